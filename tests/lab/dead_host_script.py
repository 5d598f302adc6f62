"""Somebody's own training: ranks reduce until one host is dead and torch ends the others, traced or not."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=10)


def main(place: Path, name: str) -> None:
    # Some have imported torch much earlier than others, and the timeout counts for the rendezvous, too.
    (place / f"come-{name}-{os.environ['RANK']}").touch()
    while len(list(place.glob(f"come-{name}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank, value = dist.get_rank(), torch.ones(1)
    try:
        while True:
            dist.all_reduce(value)
            (place / f"ready-{name}-{rank}").touch()
            time.sleep(0.05)
    except RuntimeError:
        (place / f"raised-{name}-{rank}").write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
