"""What a killed rank leaves can be read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cases import each_case

from hpcpace.trace.reader import read_trace

_CHILD = Path(__file__).with_name("kill_child.py")
_NUM_KILLS = 50
_PER_TEST = 10

Recording = Callable[[Path, Path, int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    """Let a rank record into a trace and a log; it is killed at the end of the block, which some flushes precede."""
    with subprocess.Popen(
        [sys.executable, str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ranks:
        assert ranks.stdin is not None
        assert ranks.stdout is not None
        asked, told = ranks.stdin, ranks.stdout

        @contextmanager
        def of_rank(path: Path, log: Path, num_flushes: int) -> Iterator[None]:
            asked.write(f"{path}\t{log}\n")
            asked.flush()
            pid = int(told.readline())
            try:
                while not log.exists() or log.read_bytes().count(b"\n") < num_flushes:
                    os.kill(pid, 0)  # fails where the rank has ended by itself
                    time.sleep(0.001)
                yield
            finally:
                os.kill(pid, signal.SIGKILL)
                ended = int(told.readline())
            assert ended == -signal.SIGKILL

        yield of_rank
        asked.close()


@each_case("seed", range(_NUM_KILLS // _PER_TEST))
def test_every_row_of_completed_flushes_survives_sigkill(recording: Recording, tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    for kill in range(_PER_TEST):
        path, log = tmp_path / f"{kill}" / "rank-00000.h5", tmp_path / f"log-{kill}"
        num_flushes = choose.randrange(1, 15)
        with recording(path, log, num_flushes):
            time.sleep(choose.random() * 0.03)
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


def test_a_running_ranks_trace_is_read_whole_at_any_moment(recording: Recording, tmp_path: Path) -> None:
    path, log = tmp_path / "rank-00000.h5", tmp_path / "log"
    with recording(path, log, 1):
        for _ in range(4):
            # The last line may be half written.
            num_rows = int(log.read_bytes().rpartition(b"\n")[0].split()[-1])
            trace = read_trace(path)
            assert all("torn" in problem for problem in trace.problems)
            for table, column in (("collectives", "seq"), ("phases", "step")):
                numbers = trace.tables[table][column]
                assert len(numbers) >= num_rows
                assert np.array_equal(numbers, np.arange(len(numbers)))
