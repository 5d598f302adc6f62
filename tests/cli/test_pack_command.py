"""`hpcpace pack`: what it prints, its exit codes, and that the other commands read what it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory

Call = Callable[..., tuple[int, str, str]]


def _run(folder: Path, fault: str = "none") -> RunDirectory:
    scenario = Scenario(seed=3, num_ranks=8, ranks_per_node=2, num_steps=30, fault=fault)
    return write_run(scenario, folder / "run")


def test_one_line_says_what_became_of_the_files(hpcpace: Call, tmp_path: Path) -> None:
    run = _run(tmp_path)
    code, out, err = hpcpace("pack", run.path)
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r".*/run/attempt-0: 8 ranks in 1 pack: 8 to 1 file, \S+ \S+ to \S+ \S+ \(\d\.\d\d times\), \d+\.\d s\n", out
    )
    code, out, _ = hpcpace("pack", run.path)
    assert code == 0 and "nothing to pack: 1 file" in out


def test_report_and_dump_read_a_packed_run(hpcpace: Call, tmp_path: Path) -> None:
    run = _run(tmp_path)
    rank = run.attempt(0).trace_file(3)
    before = hpcpace("dump", rank, "--json"), hpcpace("report", run.path, "--json")
    assert hpcpace("pack", run.path)[0] == 0 and not rank.exists()
    after = hpcpace("dump", rank, "--json"), hpcpace("report", run.path, "--json")
    assert after[0] == before[0] and after[1][0] == before[1][0]
    reports = [json.loads(one[1][1]) for one in (before, after)]
    for report in reports:
        del report["tracing"]["size_bytes"], report["tracing"]["files"]
    assert reports[0] == reports[1]


def test_a_run_that_may_still_be_written_is_refused(hpcpace: Call, tmp_path: Path) -> None:
    run = _run(tmp_path, "hang")
    code, _, err = hpcpace("pack", run.path)
    assert code == 2 and "has not closed" in err and "--ended" in err
    assert hpcpace("pack", run.path, "--ended", "--keep")[0] == 0
    assert len(run.attempt(0).trace_files()) == 8


def test_what_cannot_be_packed_is_a_warning(hpcpace: Call, tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.attempt(0).trace_file(2).write_bytes(b"broken")
    code, out, err = hpcpace("pack", run.path)
    assert code == 1 and "7 ranks in 1 pack" in out
    assert err.startswith("hpcpace: warning: ") and "rank-00002.h5" in err and "it is not packed" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "big"], "--size"),
        (["--memory", "some"], "memory"),
        (["--ranks-per-file", "0"], "ranks-per-file"),
        (["--attempt", "5"], "no attempt 5"),
    ],
)
def test_wrong_options_are_refused(hpcpace: Call, tmp_path: Path, options: list[str], message: str) -> None:
    code, _, err = hpcpace("pack", _run(tmp_path).path, *options)
    assert code == 2 and message in err


def test_what_is_no_run_is_refused(hpcpace: Call, tmp_path: Path) -> None:
    assert hpcpace("pack", tmp_path)[0] == 2
