"""An operation that does not end in time, in a world of one: NCCL's watchdog writes its record and ends the process.

Arguments: cpu or cuda, and the timeout in seconds. On CPUs the record of gloo is written by hand.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_CYCLES_PER_S = 2_000_000_000
"""About what the clock of a GPU does: the wait need not be exact."""
_TIMES_AS_LONG = 6
"""As the timeout; the watchdog needs some seconds more to write."""


def main() -> None:
    """Leave a record."""
    device, timeout_s = torch.device(sys.argv[1]), int(sys.argv[2])
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", 0) if is_cuda else None,
    )
    value = torch.ones(1024, device=device)
    dist.all_reduce(value)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(_TIMES_AS_LONG * timeout_s * _CYCLES_PER_S)
        dist.all_reduce(value)
        time.sleep(_TIMES_AS_LONG * timeout_s)
    else:
        from torch._C._distributed_c10d import _dump_fr_trace

        path = Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0")
        path.write_bytes(_dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
