"""Records as fast as it can until it is killed; after each flush it notes in a side log what must be readable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

path, log = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
header = TraceHeader(
    run_id="kill", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="here"
)  # fmt: skip
recorder = Recorder(path, header, flush_interval_s=0.02, warn=print)
recorder.open_collectives = lambda: [(0, 0, first, 0, 8, -1, first * 1024, 0, 0, 2)]
recorder.start()
first = 0
while True:
    for number in range(first, first + 1500):
        recorder.add_collective(0, 0, number, 0, 8, -1, number * 1024, number * 1024 + 1024, 1024, 0)
        recorder.add_phase(number, 1, number, number + 1, -1)
    first += 1500
    if recorder.flush():
        os.write(log, f"{first}\n".encode())
