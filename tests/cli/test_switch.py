"""`hpcpace switch`: an order for a running job, or why there can be none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcpace.cli import cli
from hpcpace.core.config import Config
from hpcpace.core.detail import Order, parse_order
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import RunDirectory
from hpcpace.observe.switching import OrderFile


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    attempt = run.new_attempt()
    attempt.write_json(attempt.run_json, {"config": Config().to_json()})
    return run


def _said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["switch", *words])
    if isinstance(result.exception, HpcpaceError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["on"], "on"),
        (["off"], "off"),
        (["--steps", "100:200"], "steps 100:200"),
        (["on", "--steps", "100:"], "steps 100:"),
        (["--steps", "1:2", "--detail", "collectives"], "steps 1:2 collectives"),
        (["--detail", "collectives"], "on collectives"),
        (["--detail", "steps"], "off"),
    ],
)
def test_an_order_is_written_into_the_run(run: RunDirectory, words: list[str], order: str) -> None:
    code, said = _said(str(run.path), *words)
    assert code == 0, said
    assert run.switch_file.read_text() == f"{order}\n"
    assert parse_order(order).text == order
    assert order in said and "30.0 s" in said


def test_of_a_job_that_is_over_it_is_said_that_no_rank_follows(run: RunDirectory) -> None:
    trace = run.last_attempt().trace_file(0)
    trace.write_bytes(b"")
    assert _said(str(run.path), "off") == (0, f"{run.switch_file}: off; no rank runs now, the next attempt follows\n")
    trace.with_suffix(".journal").write_bytes(b"")
    assert "within about 30.0 s" in _said(str(run.path), "off")[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "nothing to switch"),
        (["off", "--steps", "1:2"], "off takes neither"),
        (["off", "--detail", "full"], "off takes neither"),
        (["--steps", "5:3"], "empty range"),
        (["--steps", "-1:3"], "not a range"),
        (["--steps", "1:3,2:5"], "out of order"),
        (["--steps", "1:2,3:4"], "takes one"),
        (["--detail", "low"], "low"),
        (["maybe"], "maybe"),
    ],
)
def test_what_is_no_order_is_refused(run: RunDirectory, words: list[str], problem: str) -> None:
    code, said = _said(str(run.path), *words)
    assert code == 2 and problem in said
    assert not run.switch_file.exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"clock": {"enabled": False, "interval_s": 30}}, "do not compare clocks"),
        ({"pace": {"policy": "slack"}}, "paced"),
        ({"clock": {}}, "does not say how the job was started"),
        ({"clock": {"enabled": True, "interval_s": 1e999}}, "does not say how the job was started"),
        ({"clock": {"enabled": True, "interval_s": float("nan")}}, "does not say how the job was started"),
        ({"clock": {"enabled": True, "interval_s": 10**400}}, "does not say how the job was started"),
    ],
)
def test_a_job_that_follows_no_orders_is_refused(
    run: RunDirectory, change: dict[str, dict[str, object]], problem: str
) -> None:
    attempt = run.last_attempt()
    attempt.write_json(attempt.run_json, {"config": Config().to_json() | change})
    code, said = _said(str(run.path), "off")
    assert code == 2 and problem in said
    assert not run.switch_file.exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "5", "{", json.dumps({"config": 5}), "[" * 100_000, '{"config":' * 50_000, "9" * 100_000],
    ids=["empty", "list", "number", "cut", "no settings", "deep list", "deep object", "long number"],
)
def test_a_damaged_record_is_refused(run: RunDirectory, content: str) -> None:
    run.last_attempt().run_json.write_text(content)
    code, said = _said(str(run.path), "off")
    assert code == 2 and "does not say how the job was started" in said
    assert len(said) < 2 * len(str(run.path)) + 300


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_the_file_is_one_that_the_ranks_follow_whatever_the_umask(run: RunDirectory, umask: int) -> None:
    orders, warnings = list[Order](), list[str]()
    before = os.umask(umask)
    try:
        assert _said(str(run.path), "off")[0] == 0
    finally:
        os.umask(before)
    assert run.switch_file.stat().st_mode & 0o777 == 0o644
    OrderFile(run, give=orders.append, warn=warnings.append).look()
    assert (orders, warnings) == ([parse_order("off")], [])


def test_a_caller_whom_no_rank_follows_is_told_so(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    code, said = _said(str(run.path), "off")
    assert code == 2 and "belongs to" in said and "only that user and root" in said
    assert not run.switch_file.exists()


@pytest.mark.root
def test_root_may_switch_the_job_of_anybody(run: RunDirectory, give_away: Callable[[Path], None]) -> None:
    give_away(run.last_attempt().path)
    assert _said(str(run.path), "off")[0] == 0


def test_a_file_system_that_gives_files_away_is_an_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Folder.status

    def squashed(folder: Folder, name: str) -> os.stat_result:
        facts = status(folder, name)
        return os.stat_result((*facts[:4], 65534, *facts[5:])) if name == run.switch_file.name else facts

    monkeypatch.setattr(Folder, "status", squashed)
    code, said = _said(str(run.path), "off")
    assert code == 2 and "no rank follows" in said and "as the user of the job" in said
    assert not run.switch_file.exists()


def test_a_folder_in_the_place_of_the_order_is_refused(run: RunDirectory) -> None:
    run.switch_file.mkdir()
    code, said = _said(str(run.path), "off")
    assert code == 2 and "cannot write" in said


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    code, said = _said(str(tmp_path), "off")
    assert code == 2 and str(tmp_path) in said
