"""Which source of a setting wins, and that each is known by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcpace.config_sources import REQUESTED, Resolved, resolve
from hpcpace.errors import ConfigError

RULE = "[[rollout]]\npartitions = ['gpu']\ntrace.flush_interval_s = 2\n"
GPU_JOB = {"SLURM_JOB_PARTITION": "gpu"}
Resolve = Callable[..., Resolved]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """Resolve the settings under texts of the site's, the user's and a named file."""

    def resolve_files(*, site: str = "", user: str = "", file: str | None = None, **sources: object) -> Resolved:
        paths = {"site": tmp_path / "site.toml", "user": tmp_path / "home/.config/hpcpace.toml"}
        for name, text in (("site", site), ("user", user)):
            if text:
                paths[name].parent.mkdir(parents=True, exist_ok=True)
                paths[name].write_text(text)
        if file is not None:
            (tmp_path / "file.toml").write_text(file)
            sources["file"] = tmp_path / "file.toml"
        sources["environ"] = {"HOME": str(tmp_path / "home"), **sources.get("environ", {})}
        return resolve(site_file=paths["site"], **sources)

    return resolve_files


def _flush(found: Resolved) -> tuple[float, str]:
    return found.config.trace.flush_interval_s, Path(found.origin("trace", "flush_interval_s")).name


def test_each_source_wins_over_the_ones_before(resolved: Resolve) -> None:
    sources: dict[str, object] = {}
    steps = [
        ({}, (1.0, "default")),
        ({"site": "[trace]\nflush_interval_s = 1.5\n"}, (1.5, "site.toml")),
        ({"site": "[trace]\nflush_interval_s = 1.5\n" + RULE, "environ": GPU_JOB}, (2.0, "site.toml")),
        ({"user": "[trace]\nflush_interval_s = 3\n"}, (3.0, "hpcpace.toml")),
        ({"file": "[trace]\nflush_interval_s = 4\n"}, (4.0, "file.toml")),
        ({"environ": {**GPU_JOB, "HPCPACE_TRACE_FLUSH_INTERVAL_S": "5"}}, (5.0, "HPCPACE_TRACE_FLUSH_INTERVAL_S")),
        ({"options": {"trace": {"flush_interval_s": 6.0}}}, (6.0, "the command line")),
    ]
    for more, expected in steps:
        sources |= more
        assert _flush(resolved(**sources)) == expected


def test_a_rule_is_named_with_its_number_and_file(resolved: Resolve, tmp_path: Path) -> None:
    found = resolved(site=RULE, environ=GPU_JOB)
    assert found.origin("trace", "flush_interval_s") == f"rule 1 of {tmp_path}/site.toml"
    assert _flush(resolved(site=RULE, environ={"SLURM_JOB_PARTITION": "cpu"})) == (1.0, "default")


def test_the_last_rule_that_holds_wins(resolved: Resolve) -> None:
    later = "[[rollout]]\nusers = ['ann']\ntrace.flush_interval_s = 7\n"
    assert _flush(resolved(site=RULE + later, environ={**GPU_JOB, "SLURM_JOB_USER": "ann"}))[0] == 7
    assert _flush(resolved(site=RULE + later, environ={**GPU_JOB, "SLURM_JOB_USER": "bob"}))[0] == 2


_EVERYBODY = "[[rollout]]\ntrace.enabled = true\npace.policy = 'slack'\n"


@pytest.mark.parametrize(
    "sources",
    [
        {"environ": {"HPCPACE_OPT_OUT": "1"}},
        {"environ": {"HPCPACE_OPT_OUT": "1", "HPCPACE_TRACE_ENABLED": "1"}},
        {"environ": {"HPCPACE_TRACE_ENABLED": "false", "HPCPACE_PACE_POLICY": "none"}},
        {"user": "[trace]\nenabled = false\n[pace]\npolicy = 'none'\n"},
    ],
    ids=["opt-out", "opt-out over a variable", "variables", "file"],
)
def test_a_user_can_say_no_to_a_roll_out(resolved: Resolve, sources: dict[str, object]) -> None:
    for requested in (None, REQUESTED):
        config = resolved(site=_EVERYBODY, requested=requested, **sources).config
        assert (config.trace.enabled, config.pace.policy) == (False, "none")


def test_who_asks_for_a_trace_gets_one_where_the_site_traces_nobody(resolved: Resolve) -> None:
    site = "[trace]\nenabled = false\n"
    assert not resolved(site=site).config.trace.enabled
    assert resolved(site=site, requested=REQUESTED).config.trace.enabled


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_an_opt_out_that_is_off_changes_nothing(resolved: Resolve, value: str) -> None:
    assert resolved(environ={"HPCPACE_OPT_OUT": value}).config.trace.enabled


def test_the_sites_file_may_be_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[trace]\nflush_interval_s = 8\n")
    assert _flush(resolve(environ={"HPCPACE_SITE_FILE": str(tmp_path / "site.toml")})) == (8.0, "site.toml")


def test_the_users_file_may_be_where_xdg_says(tmp_path: Path) -> None:
    (tmp_path / "hpcpace.toml").write_text("[trace]\nflush_interval_s = 9\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HPCPACE_SITE_FILE": "/no/such/file"}
    assert _flush(resolve(environ=environ)) == (9.0, "hpcpace.toml")


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"user": RULE}, "{tmp}/home/.config/hpcpace.toml: [[rollout]] is for the site's file only; set its settings"),
        ({"file": RULE}, "{tmp}/file.toml: [[rollout]] is for the site's file only; set its settings"),
        ({"site": "rollout = 3\n"}, "{tmp}/site.toml: rollout must be a list of tables, each headed by [[rollout]]"),
        ({"site": RULE + "x\n"}, "{tmp}/site.toml is not valid TOML: "),
        ({"environ": {"HPCPACE_OPT_OUT": "perhaps"}}, "HPCPACE_OPT_OUT is 'perhaps': expected on or off"),
        (
            {"site": "[[rollout]]\npartitions = 'other'\ntrace.flush_interval_s = 0\n"},
            "trace.flush_interval_s is 0.0: it must be a number of at least 0.01 (set by rule 1 of {tmp}/site.toml)",
        ),
        (
            {"user": "[trace]\nmax_rows = 1\n"},
            "trace.max_rows is 1: it must be a number of at least 100000 (set by {tmp}/home/.config/hpcpace.toml)",
        ),
        (
            {"environ": {"HPCPACE_TRACE_MAX_ROWS": "1"}},
            "trace.max_rows is 1: it must be a number of at least 100000 (set by HPCPACE_TRACE_MAX_ROWS)",
        ),
    ],
)
def test_a_wrong_source_is_refused_by_name(resolved: Resolve, tmp_path: Path, sources, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**sources)
    assert str(caught.value).startswith(message.format(tmp=tmp_path))


def test_a_users_file_that_cannot_be_read_is_an_error_and_not_consent(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "home/.config/hpcpace.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*/hpcpace\.toml: Is a directory"):
        resolved()
