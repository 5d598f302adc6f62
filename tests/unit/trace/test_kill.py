"""What a killed rank leaves can be read."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcpace.trace.reader import read_trace

_CHILD = Path(__file__).with_name("kill_child.py")
_NUM_KILLS = 50
_PER_TEST = 10


@pytest.mark.parametrize("seed", range(_NUM_KILLS // _PER_TEST))
def test_every_row_of_completed_flushes_survives_sigkill(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    for kill in range(_PER_TEST):
        path, log = tmp_path / f"{kill}" / "rank-00000.h5", tmp_path / f"log-{kill}"
        num_flushes = choose.randrange(1, 15)
        with subprocess.Popen([sys.executable, str(_CHILD), str(path), str(log)]) as child:
            try:
                while not log.exists() or log.read_bytes().count(b"\n") < num_flushes:
                    assert child.poll() is None
                    time.sleep(0.001)
                time.sleep(choose.random() * 0.03)
            finally:
                child.send_signal(signal.SIGKILL)
        num_rows = int(log.read_text().split()[-1])
        trace = read_trace(path)
        assert all("torn" in problem for problem in trace.problems)
        assert not trace.closed_cleanly
        for table, column in (("collectives", "seq"), ("phases", "step")):
            numbers = trace.tables[table][column]
            assert len(numbers) >= num_rows
            assert np.array_equal(numbers, np.arange(len(numbers)))
        assert np.array_equal(trace.tables["phases"]["begin_ns"], np.arange(len(trace.tables["phases"])))
        assert np.array_equal(trace.tables["collectives"]["enter_ns"], 1024 * trace.tables["collectives"]["seq"])


def test_a_running_ranks_trace_is_read_whole_at_any_moment(tmp_path: Path) -> None:
    path, log = tmp_path / "rank-00000.h5", tmp_path / "log"
    with subprocess.Popen([sys.executable, str(_CHILD), str(path), str(log)]) as child:
        try:
            while not log.exists() or not log.read_bytes():
                assert child.poll() is None
                time.sleep(0.001)
            for _ in range(4):
                # The last line may be half written.
                num_rows = int(log.read_bytes().rpartition(b"\n")[0].split()[-1])
                trace = read_trace(path)
                assert all("torn" in problem for problem in trace.problems)
                for table, column in (("collectives", "seq"), ("phases", "step")):
                    numbers = trace.tables[table][column]
                    assert len(numbers) >= num_rows
                    assert np.array_equal(numbers, np.arange(len(numbers)))
        finally:
            child.send_signal(signal.SIGKILL)
