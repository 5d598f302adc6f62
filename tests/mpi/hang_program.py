"""A training of which rank 2 holds up the others from its seventh step on: hang_program.py WAY RUN_DIR.

Operations run out of time after some seconds, so that it ends by itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcpace

TIMEOUT_S = 6.0


def main(way: str, run_dir: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    pair = dist.new_group([2, 3])
    with hpcpace.session(run_dir=run_dir) as session, contextlib.suppress(RuntimeError):
        for step in range(8):
            with session.phase("data"):
                if step == 6 and dist.get_rank() == 2 and way == "data":
                    threading.Event().wait(TIMEOUT_S + 1)
            if step == 6 and dist.get_rank() == 2 and way == "operation":
                dist.broadcast(torch.ones(4), 0)
            if step == 6 and dist.get_rank() == 2 and way == "size":
                threading.Event().wait(TIMEOUT_S / 3)  # until the others have called, on a busy machine as well
                dist.all_reduce(torch.ones(1024))  # more than the others expect: gloo aborts one of them
            if step == 6 and dist.get_rank() == 3 and way == "chain":
                dist.recv(torch.ones(4), 2, group=pair)
            if step == 6 and dist.get_rank() == 2 and way == "chain":
                threading.Event().wait(TIMEOUT_S + 1)
            dist.all_reduce(torch.ones(4))
            session.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
