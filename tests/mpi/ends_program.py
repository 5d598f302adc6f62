"""A training of which rank 1 ends in its seventh step: ends_program.py raise|exit|kill|stay RUN_DIR."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import hpcpace


def main(way: str, run_dir: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 if way == "stay" else 60))
    with hpcpace.session(run_dir=run_dir) as session:
        for step in range(8):
            if step == 6 and dist.get_rank() == 1:
                end(way)
            dist.all_reduce(torch.ones(4))
            session.step()
    dist.destroy_process_group()


def end(way: str) -> None:
    """End this process, or stay away from the others."""
    if way == "raise":
        raise ValueError("no batch from /data, password=a-secret-7")
    if way == "exit":
        sys.exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
