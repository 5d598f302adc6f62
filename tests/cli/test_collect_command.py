"""`hpcpace collect`: what it brings home, and what it says of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpace.rundir import RunDirectory

_KILLED = """
import os, signal, sys
from pathlib import Path
from hpcpace.observe.node_local import NodeLocalTrace
home = Path(sys.argv[2])
trace = NodeLocalTrace(Path(sys.argv[1]), "hpcpace-run-attempt-0-rank-1-17", home)
with trace.open_folder() as folder:
    Path(folder.path, home.name).write_text("rows")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run with an attempt whose rank 1 was killed while its trace was on a local disk."""
    run = RunDirectory(tmp_path / "run")
    attempt = run.new_attempt()
    attempt.write_json(attempt.run_json, {"config": {"trace": {"trace_dir": str(tmp_path / "local")}}})
    arguments = [str(tmp_path / "local"), str(attempt.trace_file(1))]
    assert subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode == -9
    return run


def test_brings_the_trace_of_a_killed_rank_home_from_where_the_run_had_it(hpcpace, run, tmp_path):
    home = run.attempt(0).trace_file(1)
    local = tmp_path / "local" / "hpcpace-run-attempt-0-rank-1-17"
    assert hpcpace("collect", run.path) == (0, f"{local}/rank-00001.h5 -> {home}\n", "")
    assert home.read_text() == "rows" and not local.exists()
    code, shown, _ = hpcpace("collect", run.path)
    assert code == 0 and shown.startswith(f"no trace of {run.path} is left on ")


def test_a_folder_may_be_named(hpcpace, run, tmp_path):
    run.attempt(0).run_json.unlink()
    code, shown, _ = hpcpace("collect", "--trace-dir", tmp_path / "local", run.path)
    assert code == 0 and "->" in shown


def test_a_trace_that_stays_is_a_warning(hpcpace, run, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, shown, error = hpcpace("collect", run.path)
    assert (code, shown) == (1, "")
    assert error.endswith("rank-00001.h5 stays: No space left on device\nhpcpace: 1 trace could not be copied\n")


def test_refuses_a_run_and_a_folder_that_do_not_exist(hpcpace, run, tmp_path):
    code, _, error = hpcpace("collect", tmp_path / "none")
    assert code == 2 and error.startswith(f"hpcpace: no run directory at {tmp_path}/none")
    code, _, error = hpcpace("collect", "--trace-dir", tmp_path / "none", run.path)
    assert code == 2 and error.startswith(f"hpcpace: cannot look for traces in {tmp_path}/none: No such file")
