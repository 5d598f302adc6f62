"""Forks a rank for each line of stdin, which names a trace file and a log, and says when it runs and how it ended.

A rank records as fast as it can until it is killed; after each flush it notes in its log what must be readable. All
ranks are forked from one process, because most of the time of a rank so short would go into its imports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

HEADER = TraceHeader(
    run_id="kill", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="here"
)  # fmt: skip


def record(path: Path, log: int) -> NoReturn:
    recorder = Recorder(path, HEADER, flush_interval_s=0.02, warn=print)
    first = 0
    recorder.open_collectives = lambda: [(0, 0, first, 0, 8, -1, first * 1024, 0, 0, 2)]
    recorder.start()
    while True:
        for number in range(first, first + 1500):
            recorder.add_collective(0, 0, number, 0, 8, -1, number * 1024, number * 1024 + 1024, 1024, 0)
            recorder.add_phase(number, 1, number, number + 1, -1)
        first += 1500
        if recorder.flush():
            os.write(log, f"{first}\n".encode())


for line in sys.stdin:
    trace, notes = line.rstrip("\n").split("\t")
    pid = os.fork()
    if not pid:
        try:
            record(Path(trace), os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        finally:
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
