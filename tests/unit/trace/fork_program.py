"""Records around a forked child that uses, closes and drops what it inherited, and ends as argv[2] says."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from pathlib import Path

from rows import header

from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import CHUNK_ROWS

path, end = Path(sys.argv[1]), sys.argv[2]
recorder = Recorder(path, header(), flush_interval_s=3600.0, warn=print)
recorder.start()


def record(first: int) -> None:
    for step in range(first, first + CHUNK_ROWS + 10):
        recorder.add_phase(step, 1, step, step + 1, -1)
    assert recorder.flush()


def use(parent_has_written: multiprocessing.synchronize.Event) -> None:
    """What a worker of a data loader may come to do with a recorder that it inherited."""
    global recorder
    parent_has_written.wait()
    with recorder.phase("data"):
        pass
    assert not recorder.flush()
    recorder.close()
    del recorder
    gc.collect()


fork = multiprocessing.get_context("fork")
record(0)
has_written = fork.Event()
if end == "worker":
    worker = fork.Process(target=use, args=(has_written,))
    worker.start()
    child = worker.pid
else:
    child = os.fork()
    if child == 0:
        use(has_written)
        sys.exit(0)
record(CHUNK_ROWS + 10)
has_written.set()
if end == "worker":
    worker.join()
    assert worker.exitcode == 0
else:
    assert os.waitpid(child, 0)[1] == 0
if len(sys.argv) > 3:
    os._exit(0)
record(2 * (CHUNK_ROWS + 10))
recorder.close()
