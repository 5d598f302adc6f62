"""How long each of several calls of an operation takes, on the host's clock or, for NCCL, on the device's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Times:
    """What one rank measured.

    Attributes:
        duration_ns: from the end of one call to the end of the next, float64, (num_calls,): calls follow each other
            without a pause, as in nccl-tests.
        gap_ns: from the end of one call to the begin of the next on the host, float64, (num_calls,).
    """

    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]


def timed_calls(issue: Callable[[], list[Any]], num_calls: int, device: torch.device) -> Times:
    """Call an operation once more than asked for, and time all calls but the first.

    Args:
        issue: begins the operation; returns what is waited for, in order.
        num_calls: how many are timed, at least 1.
        device: of the buffers.

    Raises:
        RuntimeError: the operation failed.
    """
    with _without_collections():
        return _on_device(issue, num_calls) if device.type == "cuda" else _on_host(issue, num_calls)


def _on_host(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    begin_ns = np.empty(num_calls + 1, np.int64)
    end_ns = np.empty(num_calls + 1, np.int64)
    clock = time.perf_counter_ns
    for call in range(num_calls + 1):
        begin_ns[call] = clock()
        for work in issue():
            work.wait()
        end_ns[call] = clock()
    return Times(duration_ns=np.diff(end_ns).astype(np.float64), gap_ns=(begin_ns[1:] - end_ns[:-1]).astype(np.float64))


def _on_device(issue: Callable[[], list[Any]], num_calls: int) -> Times:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    gap_ns = np.empty(num_calls + 1)
    clock = time.perf_counter_ns
    ended_ns = clock()
    for call, event in enumerate(events):
        gap_ns[call] = clock() - ended_ns
        for work in issue():
            work.wait()  # lets the stream wait, not the host
        event.record()
        ended_ns = clock()
    torch.cuda.synchronize()
    milliseconds = [before.elapsed_time(after) for before, after in pairwise(events)]
    return Times(duration_ns=np.array(milliseconds) * 1e6, gap_ns=gap_ns[1:])


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
