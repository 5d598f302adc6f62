"""The process that makes a card: bounded in time, size and memory, and never a reason to fail or to wait for long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun
from hpcpace.cli import run_card
from hpcpace.core.rundir import Attempt
from hpcpace.observe import card
from hpcpace.observe.card import Card, CardVerdict

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let another program make the cards."""

    def put(source: str) -> None:
        (tmp_path / "made_up_card.py").write_text(source)

    monkeypatch.setattr(card, "_PROGRAM", "made_up_card")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return put


def _shown(tmp_path: Path, timeout_s: float = 30.0) -> list[str]:
    shown: list[str] = []
    made = Card(Attempt(tmp_path / "run" / "attempt-0"), world_size=2, timeout_s=timeout_s, show=shown.append)
    made.start()
    made.wait()
    made.wait()
    return shown


def test_what_the_process_prints_is_shown_once(program: Callable[[str], None], tmp_path: Path) -> None:
    program("print('verdict')")
    assert _shown(tmp_path) == ["verdict\n"]


def test_the_verdict_behind_the_card_is_kept_and_not_shown(program: Callable[[str], None], tmp_path: Path) -> None:
    said = CardVerdict(headline="healthy: \u201cé", mode="healthy", loss_share=0.0, confidence=0.95)
    for behind, expected in (
        (said.behind(""), said),
        (said.behind("").replace("0.95", "[]"), None),
        ("\0{", None),
        ("", None),
    ):
        program(f"import sys; sys.stdout.write({'card' + behind!r})")
        shown: list[str] = []
        made = Card(Attempt(tmp_path / "run" / "attempt-0"), world_size=2, timeout_s=30.0, show=shown.append)
        made.start()
        assert (made.verdict_in_time(), shown) == (expected, ["card"])
        made.wait()


def test_ctrl_c_while_a_job_waits_for_the_verdict_is_the_jobs_own(tmp_path: Path) -> None:
    made = Card(Attempt(tmp_path / "run" / "attempt-0"), world_size=2, timeout_s=30.0, show=print)
    with pytest.raises(KeyboardInterrupt), made._given_up_at_sigterm():
        raise KeyboardInterrupt
    assert made.verdict_in_time() is None


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time; time.sleep(60)", "longer than 1 s"),
        ("import os; os.close(1); os.close(2)", "exit code 0"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
    ],
)
def test_a_process_that_fails_or_takes_long_costs_one_line(
    program: Callable[[str], None], tmp_path: Path, source: str, why: str
) -> None:
    program(source)
    (line,) = _shown(tmp_path, timeout_s=1.0 if "sleep" in source else 30.0)
    assert line.count("\n") == 1 and why in line and line.endswith(f": hpcpace report {tmp_path / 'run'}\n")


def test_without_a_python_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    (line,) = _shown(tmp_path)
    assert "no summary here" in line


def test_a_signal_with_a_handler_of_the_job_ends_the_waiting(program: Callable[[str], None], tmp_path: Path) -> None:
    program(f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)")
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    shown: list[str] = []
    try:
        made = Card(Attempt(tmp_path / "run" / "attempt-0"), world_size=2, timeout_s=60.0, show=shown.append)
        begin_s = time.monotonic()
        with made._given_up_at_sigterm():  # from its start on, as the process may be quicker than this test
            made.start()
            made._is_over.wait(60.0)
        assert time.monotonic() - begin_s < 55 and received == [signal.SIGTERM] and shown == []
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def _printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    attempt: Attempt,
    ranks: int,
    *,
    left_bytes: int = 1 << 40,
) -> str:
    monkeypatch.setattr(run_card, "_take_little", lambda: None)
    monkeypatch.setattr(run_card, "_memory_left", lambda *_: iter([left_bytes]))
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    run_card.main([str(attempt.path), str(ranks), "0.2", str(os.getppid()), "runs/mine"])
    return capsys.readouterr().out


def test_runs_that_no_job_should_wait_for_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = SyntheticRun(num_ranks=2, num_steps=30).write(tmp_path / "run").attempts()[-1]
    card, _, verdict = _printed(capsys, monkeypatch, attempt, 2).partition("\0")
    assert "Verdict" in card and json.loads(verdict)["headline"][:60] in " ".join(card.split())
    little = _printed(capsys, monkeypatch, attempt, 2, left_bytes=1 << 20)
    assert little.startswith("hpcpace: no summary here (the job has only 1.05 MB of memory left)")
    assert "the trace of rank 2 is not here yet" in _printed(capsys, monkeypatch, attempt, 3)
    (attempt.trace_dir / "rank-00001.journal").write_bytes(b"")
    assert "not closed" in _printed(capsys, monkeypatch, attempt, 2)
    (attempt.trace_dir / "rank-00001.journal").unlink()
    monkeypatch.setattr(run_card, "MAX_TRACE_BYTES", 1000)
    assert "of traces take longer" in _printed(capsys, monkeypatch, attempt, 2)
    short = SyntheticRun(num_ranks=2, num_steps=1).write(tmp_path / "short").attempts()[-1]
    monkeypatch.setattr(run_card, "MAX_TRACE_BYTES", 1 << 30)
    said = "hpcpace: no summary here (cannot tell: none of the 1 common steps"
    assert _printed(capsys, monkeypatch, short, 2).startswith(said)


def test_a_job_with_little_memory_left_gets_one_line(tmp_path: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "fs" / "job" / "step"
    own.mkdir(parents=True)
    groups.write_text("12:cpuset:/x\n0::/job/step\n")
    for folder, limit in ((own, "max"), (own.parent, "1000000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900000\n")
        (folder / "memory.stat").write_text("anon 800000\ninactive_file 50000\n")
    assert list(run_card._memory_left(groups, tmp_path / "fs")) == [150000]
    assert list(run_card._memory_left(tmp_path / "none", tmp_path / "fs")) == []


def test_the_process_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "attempt-0"
    attempt.mkdir(parents=True)
    # The rank is a shell that is gone at once; the process waits for files that never come.
    words = [sys.executable, "-P", "-m", "hpcpace.cli.run_card", str(attempt), "2", "300"]
    shell = f"{' '.join(words)} $$ run & echo $!"
    result = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=60)
    assert result.stdout.strip().isdecimal()  # it has closed stdout, for which `run` waits, and said nothing
