"""`hpcpace config`: what it prints of settings, their sources and the rules of a roll-out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpace.core.config import DECLARED_BY
from hpcpace.core.setting_values import variables

SITE = """\
[trace]
enabled = false

[[rollout]]
partitions = ["gpu"]
trace.enabled = true
trace.trace_dir = "/local/of/the/node"

[[rollout]]
users = ["ann"]
pace.policy = "slack"
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the command a site's file, a home without one, and a job of Ann's on the partition gpu."""
    for _, _, variable in variables():
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    for name, value in {
        "HPCPACE_SITE_FILE": str(path),
        "HOME": str(tmp_path),
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_USER": "bob",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HPCPACE_SITE_FILE", str(path))
    return path


def test_says_what_holds_and_where_it_comes_from(hpcpace, site, monkeypatch):
    monkeypatch.chdir(site.parent)
    monkeypatch.setenv("HPCPACE_SITE_FILE", "site.toml")
    monkeypatch.setenv("HPCPACE_CLOCK_ENABLED", "off")
    assert hpcpace("config", "--changed") == (
        0,
        "Roll-out of site.toml\n"
        "  rule 1 holds for this job\n"
        "  rule 2 does not hold: the user is 'bob'\n"
        "\n"
        "[trace]\n"
        "  enabled               on                  rule 1 of site.toml\n"
        "  trace_dir             /local/of/the/node  rule 1 of site.toml\n"
        "[clock]\n"
        "  enabled               off                 HPCPACE_CLOCK_ENABLED\n",
        "",
    )


def test_shows_every_setting_within_80_columns(hpcpace, site):
    site.write_text(SITE + f"[lab]\nshare = ['/{'a' * 70} b', '/{'c' * 60}']\n")
    code, shown, _ = hpcpace("config")
    assert code == 0 and max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n[") == len(DECLARED_BY)


def test_shows_chosen_sections_only(hpcpace):
    _, shown, _ = hpcpace("config", "clock")
    assert "[clock]" in shown and "[trace]" not in shown


def test_says_that_nothing_is_changed(hpcpace):
    code, out, _ = hpcpace("config", "--changed", "clock")
    assert (code, out.splitlines()[-1]) == (0, "all settings have their defaults")


def test_prints_the_same_for_programs(hpcpace, site):
    _, shown, _ = hpcpace("config", "--json", "trace")
    content = json.loads(shown)
    assert content["site_file"] == {"path": str(site), "exists": True}
    assert [(rule["holds"], rule["reason"]) for rule in content["rollout"]] == [
        (True, ""),
        (False, "the user is 'bob'"),
    ]
    assert content["settings"]["trace"]["enabled"] == {"value": True, "source": f"rule 1 of {site}"}
    assert content["settings"]["trace"]["max_rows"] == {"value": 1_000_000, "source": "default"}


def test_says_who_records_where_the_site_traces_nobody(hpcpace, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_PARTITION", "cpu")
    _, shown, _ = hpcpace("config", "trace")
    assert "record, because their users ask for it" in " ".join(shown.split())


def test_a_wrong_rule_is_one_line_with_its_file(hpcpace, site):
    site.write_text("[[rollout]]\nshare = 2\ntrace.enabled = true\n")
    assert hpcpace("config") == (
        2,
        "",
        f"hpcpace: rule 1 of {site}: share is 2: expected a number above 0 and at most 1\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "no section 'nothing': the sections are trace"),
        (("--site-file", "/no/such/file"), "no site file at /no/such/file: name a TOML file"),
        (("--config", "/no/such/file"), "cannot read the configuration file /no/such/file: No such file or directory"),
    ],
)
def test_refuses_what_does_not_exist(hpcpace, arguments, message):
    code, shown, error = hpcpace("config", *arguments)
    assert (code, shown) == (2, "") and error.startswith(f"hpcpace: {message}")


def test_secrets_are_not_shown(hpcpace, monkeypatch):
    monkeypatch.setenv("HPCPACE_TRAIN_RESUME", "https://me:hunter2hunter2@host/data")
    _, shown, _ = hpcpace("config", "train")
    assert "hunter2" not in shown and "[redacted]" in shown
