"""A program that closes all descriptors that it does not know finds its next files as it wrote them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcpace.core.rundir import open_run
from hpcpace.trace.attempt_reader import read_attempt

_PROGRAM = """
import os, sys, hpcpace
run, most = sys.argv[1:]
with hpcpace.session(run_dir=run, summary=False) as session:
    session.step()
    session._recording.recorder.flush()
    os.closerange(3, int(most))
    files = [open(f"{run}-{number}", "w+b") for number in range(60)]
    for file in files:
        file.write(b"mine")
        file.flush()
    session.step()
    session._recording.recorder.flush()
for file in files:
    file.seek(0)
    assert file.read() == b"mine", file.name
    file.close()
"""


@pytest.mark.parametrize(("most", "is_recorded"), [(256, True), (4096, False)])
def test_nothing_of_ours_is_written_to_files_that_take_our_numbers(
    tmp_path: Path, most: int, is_recorded: bool
) -> None:
    words = [sys.executable, "-W", "error", "-c", _PROGRAM, str(tmp_path / "run"), str(most)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    if is_recorded:
        assert not result.stderr
        (trace,) = read_attempt(open_run(tmp_path / "run").attempt(0)).traces
        assert len(trace.tables["steps"]) == 2
    else:
        assert "Bad file descriptor; training goes on" in result.stderr
