"""The peak memory of a rank, and the errors that mean that it ran out of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak memory of this process so far: `rss_bytes`, and `device_bytes`, 0 without a GPU.

    Linux counts the first (VmHWM of /proc/self/status), torch's caching allocator the second; what CUDA, NCCL and
    libraries take besides torch's tensors is not in it.
    """
    device_bytes = int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
    return {"rss_bytes": _peak_rss_bytes(), "device_bytes": device_bytes}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    On CPUs torch raises a plain RuntimeError, which only its text tells from others ("DefaultCPUAllocator: can't
    allocate memory" in c10/core/impl/alloc_cpu.cpp; NCCL and gloo pass on the words of the system).
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = r"can't allocate memory|not enough memory|CUDA out of memory|Cannot allocate memory|std::bad_alloc"
    return isinstance(error, (RuntimeError, OSError)) and re.search(texts, str(error)) is not None


def memory_facts(device: torch.device, *, rank: int, host: str) -> dict[str, Any]:
    """Return what a run records of the memory of a rank."""
    return {"rank": rank, "host": host, **peak_memory(device)}


def _peak_rss_bytes() -> int:
    # ru_maxrss would do as well, had it not the peak of the process that this one was started from.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
