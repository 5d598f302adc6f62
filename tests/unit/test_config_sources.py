"""Which source of a setting wins, and that each is known by its name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError
from hpcpace.core.setting_values import JobFacts
from hpcpace.core.settings import REQUESTED, Resolved, resolve
from hpcpace.observe.settings import TraceConfig
from hpcpace.pace.settings import PaceSettings

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
    return found.config.of(TraceConfig).flush_interval_s, Path(found.origin("trace", "flush_interval_s")).name


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
        assert (config.of(TraceConfig).enabled, config.of(PaceSettings).policy) == (False, "none")


def test_who_asks_for_a_trace_gets_one_where_the_site_traces_nobody(resolved: Resolve) -> None:
    site = "[trace]\nenabled = false\n"
    assert not resolved(site=site).config.of(TraceConfig).enabled
    assert resolved(site=site, requested=REQUESTED).config.of(TraceConfig).enabled


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_an_opt_out_that_is_off_changes_nothing(resolved: Resolve, value: str) -> None:
    assert resolved(environ={"HPCPACE_OPT_OUT": value}).config.of(TraceConfig).enabled


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
    with pytest.raises(
        ConfigError, match=r"cannot read the configuration file .*/hpcpace\.toml: it is no regular file"
    ):
        resolved()


_RULES = "[[rollout]]\nnodes = {}\ntrace.enabled = true\n"
_TRACE = "[trace]\n"


@each_case(
    ("content", "words"),
    [
        pytest.param(b"a = " + b"[" * 100_000, "is not valid TOML", id="nested arrays"),
        pytest.param(b"a = " + b"{a = " * 100_000, "is not valid TOML", id="nested tables"),
        pytest.param(".".join(["a"] * 40_000) + " = 1", "more than 8192 dots", id="a key of many parts"),
        pytest.param("a = " + "9" * 100_000, "is not valid TOML", id="a number of many digits"),
        pytest.param(_TRACE + "max_rows = 0x" + "f" * 100_000, "trace.max_rows is <an integer of", id="a large number"),
        pytest.param(
            _TRACE + "copy_timeout_s = 0x" + "f" * 100_000, "is <an integer of", id="a large number for a float"
        ),
        pytest.param(_TRACE + "enabled = 0x" + "f" * 100_000, "is <an integer of", id="a large number for a switch"),
        pytest.param(_TRACE + "max_rows = inf", "trace.max_rows is inf", id="infinity"),
        pytest.param(_TRACE + "copy_timeout_s = nan", "trace.copy_timeout_s is nan", id="no number"),
        pytest.param(_TRACE + f"detail = '{'x' * 100_000}'", "at most 4096 letters", id="a long text"),
        pytest.param(_TRACE + 'trace_dir = "/tmp\\u0000"', "none of them a null", id="a null in a path"),
        pytest.param(_TRACE + "detail = [[[[[1]]]]]", "trace.detail is ", id="a list for a text"),
        pytest.param(
            "[audit]\nignore = [0x" + "f" * 100_000 + "]", "expected a list of strings", id="numbers for texts"
        ),
        pytest.param("\n".join(f"a{i} = 1" for i in range(30_000)), "and 29996 more", id="many unknown keys"),
        pytest.param(f"['{'x' * 100_000}']", "unknown section 'xxx", id="a long section"),
        pytest.param("[[rollout]]\n" * 5000, "rollout has 5000 rules, more than 100", id="many rules"),
        pytest.param(
            _RULES.format([f"n{i}x[1-65536]" for i in range(3000)]),
            "more than 262144 names are listed",
            id="many nodes",
        ),
        pytest.param(_RULES.format(["[" * 100_000]), "is no list of hosts", id="brackets"),
        pytest.param(_RULES.format(["x" * 100_000 + "[1-65536]"]), "more than 255 letters", id="long nodes"),
        pytest.param("[[rollout]]\nshare = 0x" + "f" * 100_000, "sets nothing", id="a large share of nothing"),
        pytest.param(
            "[[rollout]]\ntrace.enabled = true\nshare = 0x" + "f" * 100_000, "share is <an integer", id="a large share"
        ),
        pytest.param(f"[[rollout]]\n{'x' * 100_000} = 1", "unknown key 'xxx", id="a long condition"),
        pytest.param("#" * 2_000_000, "it has more than 1048576 bytes", id="a large file"),
        pytest.param(b"\xff\xfe[trace]", "is not valid TOML", id="no text"),
    ],
)
def test_hostile_settings_are_refused_in_bounded_time_by_a_short_message(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    file = tmp_path / "site.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        resolve(site_file=file)
    assert time.process_time() - begin < 3
    assert words in str(error.value) and len(str(error.value)) < 10 * (len(str(tmp_path)) + 400)


@each_case(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)], ids=range(3)
)
def test_settings_that_are_no_regular_file_are_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "site.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        resolve(site_file=tmp_path / "site.toml")


def test_settings_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[trace]\nflush_interval_s = 7\n")
    (tmp_path / "site.toml").symlink_to("own.toml")
    assert _flush(resolve(site_file=tmp_path / "site.toml")) == (7.0, "site.toml")


def test_rules_of_a_job_on_very_many_nodes_are_decided_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(_RULES.format(["n1"]) * 20)
    begin = time.process_time()
    found = resolve(site_file=tmp_path / "site.toml", environ={"SLURM_JOB_NODELIST": "n[1-65536]"})
    assert time.process_time() - begin < 5
    assert {objection for _, objection in found.rules} == {"the job also has n[10,100,1000,10000] and 65531 more"}


def test_components_of_a_job_have_a_limit_together() -> None:
    environ = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": "n[1-65536]" for i in range(10_000)}
    begin = time.process_time()
    assert JobFacts.of(environ).nodes == frozenset()
    assert time.process_time() - begin < 3
