"""Whatever a run leaves is as closed to others as the umask of the user wants it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

Run = Callable[..., CompletedProcess[str]]
OWN_SCRIPT = Path(__file__).with_name("own_script.py")
# Started in place of the test's own process, whose umask all others of its tests share.
_UNDER_UMASK = (
    "import os, sys; os.umask(int(sys.argv[1], 8)); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def _open_to_others(folder: Path, umask: str) -> list[str]:
    """Return the files and folders with rights that the umask takes."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}
    return sorted(f"{path.relative_to(folder)}: {mode:o}" for path, mode in modes.items() if mode & int(umask, 8))


@pytest.fixture(params=only_nightly(["027"], ["077"]))
def umask(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hpcpace(python: Run, umask: str) -> Run:
    """Run a command of hpcpace under the umask."""
    return lambda *args, **options: python("-c", _UNDER_UMASK, umask, "-m", "hpcpace", *args, **options)


def test_a_traced_script_and_its_report_leave_nothing_open(hpcpace: Run, umask: str, tmp_path: Path) -> None:
    run = tmp_path / "made" / "run"
    assert hpcpace("trace", "--run-dir", run, "--pace", "observe", "--", OWN_SCRIPT, "6").returncode == 0
    hpcpace("report", run)
    left = {path.name for path in run.rglob("*")}
    assert {"run.json", "trial.json", "rank-00000.h5", "summary.json", "report.html"} <= left
    assert list((run / "attempt-0" / "snapshot").iterdir())
    assert _open_to_others(tmp_path / "made", umask) == []


def test_a_trace_on_a_local_disk_leaves_nothing_open(hpcpace: Run, umask: str, tmp_path: Path) -> None:
    local = tmp_path / "local"
    done = hpcpace("trace", "--run-dir", tmp_path / "run", "--", OWN_SCRIPT, "6", HPCPACE_TRACE_TRACE_DIR=str(local))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "attempt-0" / "trace" / "rank-00000.h5").exists()
    assert _open_to_others(tmp_path / "run", umask) + _open_to_others(local, umask) == []


@pytest.mark.nightly
def test_a_trace_that_still_grows_is_not_open(hpcpace: Run, umask: str, tmp_path: Path) -> None:
    look = tmp_path / "killed.py"
    look.write_text(
        "import os, signal, time, torch\ntorch.ones(1, requires_grad=True).sum().backward()\n"
        "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    hpcpace("trace", "--run-dir", tmp_path / "run", "--", look, HPCPACE_TRACE_FLUSH_INTERVAL_S="0.05")
    assert (tmp_path / "run" / "attempt-0" / "trace" / "rank-00000.journal").exists()
    assert _open_to_others(tmp_path / "run", umask) == []


@pytest.mark.nightly
def test_a_training_and_its_checkpoints_leave_nothing_open(hpcpace: Run, umask: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--steps", "4", "--warmup-steps", "1", "--checkpoint-every", "2"]
    done = hpcpace("train", "gpt2", "--run-dir", run, *options)
    assert done.returncode == 0, done.stderr
    assert (run / "attempt-0" / "result.json").exists() and list((run / "checkpoints").iterdir())
    assert _open_to_others(run, umask) == []


def test_an_audit_leaves_nothing_open(hpcpace: Run, umask: str, tmp_path: Path) -> None:
    hpcpace("audit", "--save", tmp_path / "snapshots")
    assert list((tmp_path / "snapshots").iterdir())
    assert _open_to_others(tmp_path / "snapshots", umask) == []
