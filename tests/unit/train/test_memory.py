from __future__ import annotations

import mmap

import psutil
import pytest
from cases import each_case

torch = pytest.importorskip("torch")

from hpcpace.train.result import is_out_of_memory, peak_memory  # noqa: E402


def test_the_peak_covers_what_was_taken_and_stays() -> None:
    num_bytes, slack_bytes = 64 * 1024 * 1024, 4 * 1024 * 1024  # the kernel counts pages of each thread in batches
    resident_bytes = psutil.Process().memory_info().rss
    with mmap.mmap(-1, num_bytes) as taken:  # from the kernel: an allocator may have this much from the tests before
        taken[:: mmap.PAGESIZE] = b"x" * (num_bytes // mmap.PAGESIZE)
        during = peak_memory(torch.device("cpu"))
    assert during["rss_bytes"] > resident_bytes + num_bytes - slack_bytes
    assert during["device_bytes"] == 0
    assert peak_memory(torch.device("cpu"))["rss_bytes"] > during["rss_bytes"] - slack_bytes


@each_case(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ..."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("Connection closed by peer [10.0.0.1]:4711"), False),
        (ValueError("can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_tells_too_little_memory_from_other_errors(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_torchs_own_error_on_a_cpu_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
