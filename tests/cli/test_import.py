"""`hpcpace import`: other tools' traces become runs of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[1] / "data" / "imports"
DATES = {"kineto": "2024-05-23", "nsys": "2026-05-26"}
"""When these were recorded; wia does not say."""
CASES = [
    (["kineto", str(DATA / "nccl_data.json.gz")], "1 rank, 3 steps", "torch.profiler (Kineto)"),
    (["wia", str(DATA / "trace-ST.parquet")], "8 ranks, 32 steps", "StragglerAnalysis"),
    (["nsys", str(DATA / "mfu_2gpu_after.sqlite")], "2 ranks, 0 steps", "Nsight Systems 2026"),
]


@pytest.mark.parametrize(("command", "facts", "tool"), CASES)
def test_an_import_says_what_it_read_and_what_is_unknown(
    hpcpace: Call, tmp_path: Path, command: list[str], facts: str, tool: str
) -> None:
    run = tmp_path / "run"
    code, out, _ = hpcpace("import", *command, "--run-dir", run)
    assert code == 0 and facts in out and tool in out and "unknown: " in out
    has_steps = ", 0 steps" not in facts
    assert (f"next: hpcpace report {run}\n" in out) == has_steps
    file = run / "attempt-0" / "trace" / "rank-00000.h5"
    assert has_steps or f"next: hpcpace dump {file}; reports need steps (NVTX ranges named step 1, " in out
    assert hpcpace(*(["report", run] if has_steps else ["dump", file]))[0] != 2
    record = json.loads((run / "attempt-0" / "run.json").read_text())
    assert tool in record["imported"]["tool"] and record["imported"]["unknown"]
    begun = datetime.fromtimestamp(record["created_unix_ns"] / 1e9, UTC)
    assert str(begun.date()) == DATES.get(command[0], str(datetime.now(UTC).date()))
    assert record["imported"]["files"][0] == {"name": Path(command[1]).name, "bytes": Path(command[1]).stat().st_size}


def test_a_report_shows_what_the_tool_did_not_record_as_unknown(hpcpace: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hpcpace("import", "wia", DATA / "trace-ST.parquet", "--run-dir", run)
    _, out, _ = hpcpace("report", run)
    assert "unknown share of the time" in out and "0 B" not in out
    rows = [line.split() for line in out.splitlines()]
    sizes = [row[3] for row in rows if row[:1] == ["reduce_scatter"]]
    assert sizes == ["?"]


def test_other_commands_say_what_an_imported_run_does_not_have(hpcpace: Call, tmp_path: Path) -> None:
    for name, command in (("a", CASES[1][0]), ("b", CASES[2][0])):
        hpcpace("import", *command, "--run-dir", tmp_path / name)
    code, _, err = hpcpace("switch", tmp_path / "a", "on")
    assert code == 2 and "what another tool recorded" in err
    code, _, err = hpcpace("report", tmp_path / "b")
    assert code == 3 and "steps were not marked" in err


@pytest.mark.parametrize(("command", "facts", "tool"), CASES)
def test_nothing_is_overwritten(hpcpace: Call, tmp_path: Path, command: list[str], facts: str, tool: str) -> None:
    (tmp_path / "kept").write_text("mine")
    code, _, err = hpcpace("import", *command, "--run-dir", tmp_path)
    assert code == 2 and "nothing is overwritten" in err
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("tool", ["kineto", "wia", "nsys"])
def test_bad_input_leaves_no_run_behind(hpcpace: Call, tmp_path: Path, tool: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"not a trace")
    code, _, err = hpcpace("import", tool, path, "--run-dir", tmp_path / "run")
    assert code == 2 and str(path) in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_cut_off_is_a_warning_and_exit_code_1(hpcpace: Call, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    event = {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "ts": 1, "dur": 2}
    path.write_text('{"traceEvents": [' + json.dumps(event) + ', {"')
    code, _, err = hpcpace("import", "kineto", path, "--run-dir", tmp_path / "run")
    assert code == 1 and "is cut off; copy it again (after event 1;" in err


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_a_missing_package_is_named_with_what_to_install(
    hpcpace: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "hpcpace.runs.imports.wia", raising=False)
    code, _, err = hpcpace("import", "wia", DATA / "trace-ST.parquet", "--run-dir", tmp_path / "run")
    assert code == 2 and package in err and "pip install 'hpcpace[import]'" in err


def _profiles(folder: Path, num_files: int) -> None:
    step = {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "ts": 1, "dur": 2}
    for number in range(num_files):
        path = folder / f"rank-{number}-\x1b[31m{'x' * 200}.json"
        path.write_text(json.dumps([step]) if number == 0 else "[")


def test_a_thousand_files_with_a_fault_are_a_few_lines_of_warnings(hpcpace: Call, tmp_path: Path) -> None:
    (folder := tmp_path / "profiles").mkdir()
    _profiles(folder, 1_000)
    code, out, err = hpcpace("import", "kineto", folder, "--run-dir", tmp_path / "run")
    assert code == 1 and "\x1b" not in out + err
    assert "before its first event); it is left out" in err and "999 times (" in err and "all 999: --verbose" in err
    assert sum(-(-len(line) // 120) for line in err.splitlines()) <= 20


def test_an_error_about_many_files_is_short(hpcpace: Call, tmp_path: Path) -> None:
    (folder := tmp_path / "profiles").mkdir()
    _profiles(folder, 100)
    next(folder.glob("rank-0-*")).unlink()
    code, _, err = hpcpace("import", "kineto", folder, "--run-dir", tmp_path / "run")
    assert code == 2 and "\x1b" not in err and "and 96 more" in err
    assert sum(-(-len(line) // 120) for line in err.splitlines()) <= 20


def test_a_note_on_many_ranks_is_short(hpcpace: Call, tmp_path: Path) -> None:
    (folder := tmp_path / "profiles").mkdir()
    step = {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "ts": 1, "dur": 2}
    for rank in range(0, 300, 2):
        (folder / f"rank-{rank}.json").write_text(json.dumps([step]))
    code, out, _ = hpcpace("import", "kineto", folder, "--run-dir", tmp_path / "run")
    assert code == 0 and sum(-(-len(line) // 120) for line in out.splitlines()) <= 60
    (note,) = [one for one in out.splitlines() if one.startswith("note: ranks 0, 2, 4")]
    assert "30, ... and 134 more: the rank is that of the file's name" in note
