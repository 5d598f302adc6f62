"""`hpcpace collect`: what it brings home, and what it says of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpace.core.rundir import RunDirectory

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


def test_what_was_planted_on_the_disk_is_left_alone_and_told_by_kind(hpcpace, run, tmp_path, give_away):
    local = tmp_path / "local"

    def name(number):
        return local / f"hpcpace-x-attempt-0-rank-{number}-17"

    for number in range(30):
        name(number).mkdir()
    for number in range(3):
        (name(number) / "home.json").write_text("[" * 50_000)
    name(40).write_text("a file")
    os.mkfifo(name(41))
    name(42).symlink_to("/etc")
    name(43).mkdir()
    name(43).chmod(0o777)
    (local / "hpcpace-other").mkdir()
    before = sorted(path.name for path in local.iterdir())
    code, shown, error = hpcpace("collect", run.path)
    assert (code, error) == (0, "")
    assert shown.splitlines()[1:] == [
        "left alone: 3 traces: home.json does not say where the trace belongs",
        "left alone: 27 traces: it does not say where it belongs",
        "left alone: 3 traces: it is no folder, or a symbolic link to one, which is not followed here",
        "left alone: 1 trace: others can write to it",
    ]
    before.remove("hpcpace-run-attempt-0-rank-1-17")
    assert sorted(path.name for path in local.iterdir()) == before


def test_traces_of_somebody_else_are_left_alone(hpcpace, run, tmp_path, give_away):
    give_away(tmp_path / "local" / "hpcpace-run-attempt-0-rank-1-17")
    code, shown, _ = hpcpace("collect", run.path)
    assert code == 0 and "left alone: 1 trace: it belongs to somebody else" in shown
    assert hpcpace("collect", "--quiet", run.path) == (0, "", "")


@pytest.mark.parametrize("value", ["x\0y", 5, [], {}, "[" * 100, "/proc/self", "/dev/zero"])
def test_a_record_cannot_make_it_look_where_nothing_is(hpcpace, run, value):
    attempt = run.attempt(0)
    attempt.write_json(attempt.run_json, {"config": {"trace": {"trace_dir": value}}})
    assert hpcpace("collect", "--quiet", run.path) == (0, "", "")


def test_a_record_that_is_nested_without_end_names_no_folder(hpcpace, run):
    run.attempt(0).run_json.write_text("[" * 100_000)
    assert hpcpace("collect", "--quiet", run.path) == (0, "", "")
