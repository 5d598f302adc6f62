"""Jobs end with a card on stderr, and otherwise as they do without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]
SCRIPT = Path(__file__).with_name("own_script.py")
TRACE = ("-m", "hpcpace", "trace")
ON = {"HPCPACE_TRACE_SUMMARY": "true", "HPCPACE_TRACE_SUMMARY_TIMEOUT_S": "100"}


def _ours(result: CompletedProcess[str], run: Path) -> list[str]:
    """Return the lines from the card's first one on, or the last one."""
    lines = result.stderr.splitlines()
    starts = [place for place, line in enumerate(lines) if line.endswith(f"hpcpace report {run}")]
    return lines[starts[0] :] if starts else []


def test_a_traced_job_ends_with_its_card_and_the_last_line(torchrun: Run, python: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = torchrun(2, *TRACE, "--run-dir", run, "--", SCRIPT, 6, **ON)
    plain = torchrun(2, SCRIPT, 6)
    assert (result.returncode, result.stdout) == (0, plain.stdout), result.stderr
    lines = _ours(result, run)
    assert lines[0] == f"hpcpace report {run}" and lines[1].startswith("Verdict    cannot tell: "), result.stderr
    assert lines[-1].startswith("hpcpace: recorded 2 ranks, 6 steps (") and len(lines) <= 13
    off = python(*TRACE, "--run-dir", tmp_path / "off", "--no-summary", "--", SCRIPT, 6, **ON)
    assert "hpcpace: recorded 1 rank, 6 steps (" in off.stderr
    assert "Verdict" not in off.stderr and "no summary" not in off.stderr


@pytest.mark.nightly
def test_a_session_ends_with_its_card_unless_the_script_fails(python: Run, tmp_path: Path) -> None:
    result = python(SCRIPT, 6, "--session", tmp_path / "run", **ON)
    assert (result.returncode, result.stdout.count("\n")) == (0, 1)
    assert "Verdict    cannot tell: " in result.stderr
    failed = python(*TRACE, "--run-dir", tmp_path / "failed", "--", SCRIPT, 6, "--fail", **ON)
    assert failed.returncode == 1 and "Verdict" not in failed.stderr and "no summary" not in failed.stderr


def test_a_job_that_is_ended_while_its_card_is_made_ends_at_once(python: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, threading, time, torch\n"
        "for _ in range(4):\n    torch.ones(1, requires_grad=True).sum().backward()\n"
        # The journal of a second rank keeps the card waiting.
        "pathlib.Path(sys.argv[1], 'attempt-0/trace/rank-00001.journal').write_bytes(b'')\n"
        "def end_late():\n    time.sleep(3)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=end_late, daemon=True).start()\n"
    )
    result = python(*TRACE, "--run-dir", tmp_path / "run", "--", script, tmp_path / "run", **ON)
    assert result.returncode == -15, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("hpcpace: recorded 1 rank, 4 steps (")


def test_a_folder_that_takes_no_run_costs_no_card(python: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = python(*TRACE, "--run-dir", tmp_path / "file/run", "--", SCRIPT, 6, **ON)
    assert result.returncode == 0 and "Verdict" not in result.stderr and "no summary" not in result.stderr
