"""What torch's backends do with operations on devices that their callers do not see: NCCL's habits, and gloo's.

Read from torch 2.11 to 2.13; none of it could be tried on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from hpcpace.observe.device_clock import DeviceClock
from hpcpace.observe.device_times import DeviceTimes
from hpcpace.observe.replaced import replace
from hpcpace.observe.side_streams import SideStreams

_HOST_BACKENDS = ("gloo", "mpi")


def device_work(result: Any) -> Any:
    """Return the work in what an operator returned; None without one.

    A blocking call of NCCL runs on the caller's stream and has no work to wait for; neither has a send or receive of a
    batch.
    """
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    if boxed is None:
        return None
    try:
        return dist.Work.unbox(boxed)
    except RuntimeError:  # an empty box
        return None


def runs_on_host(process_group: Any) -> bool:
    """Return whether a group's operations on tensors of a device are the work of the host.

    Gloo copies such tensors to the host and sends them there; its works are complete when the host is done.
    """
    try:
        name: str = process_group._get_backend(torch.device("cuda")).name()
    except (RuntimeError, AttributeError):  # a group without a backend for devices, or of another maker
        return False
    return name in _HOST_BACKENDS


def follow_coalescing(cleanup: ExitStack, device_times: DeviceTimes) -> None:
    """Tell which operations NCCL issues as one, until the stack closes.

    Between these two calls `batch_isend_irecv` and `_coalescing_manager` only collect operations; the works that they
    return then have neither begun nor an end.
    """

    def starts(start: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            device_times.start_coalescing()
            return start(*args, **kwargs)

        return observed

    def ends(end: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            work = end(*args, **kwargs)
            device_times.end_coalescing(work)
            return work

        return observed

    _replace_if_there(cleanup, dist.ProcessGroup, "_start_coalescing", starts)
    _replace_if_there(cleanup, dist.ProcessGroup, "_end_coalescing", ends)


def follow_streams(cleanup: ExitStack, side_streams: SideStreams) -> None:
    """Tell which events are recorded on which streams and which streams wait for them, until the stack closes."""
    is_compiling = torch.compiler.is_compiling

    def records(record: Callable[..., Any]) -> Callable[..., Any]:
        def observed(stream: Any, event: Any = None) -> Any:
            event = record(stream, event)
            if not is_compiling():
                side_streams.recorded(stream, event)
            return event

        return observed

    def waits(wait: Callable[..., Any]) -> Callable[..., Any]:
        def observed(stream: Any, event: Any) -> Any:
            return wait(stream, event) if is_compiling() else side_streams.wait(stream, event, wait)

        return observed

    _replace_if_there(cleanup, torch.cuda.Stream, "record_event", records)
    _replace_if_there(cleanup, torch.cuda.Stream, "wait_event", waits)


def follow_captures(cleanup: ExitStack, device: DeviceClock) -> None:
    """Tell when CUDA graphs are captured, until the stack closes.

    The current stream alone does not say so: a query on another stream, or in another thread, breaks a capture, too.
    """

    def begins(begin: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            device.num_captures += 1
            try:
                return begin(*args, **kwargs)
            except BaseException:
                device.num_captures -= 1
                raise

        return observed

    def ends(end: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                return end(*args, **kwargs)
            finally:
                device.num_captures = max(device.num_captures - 1, 0)  # one may have begun before the session

        return observed

    _replace_if_there(cleanup, torch.cuda.CUDAGraph, "capture_begin", begins)
    _replace_if_there(cleanup, torch.cuda.CUDAGraph, "capture_end", ends)


def _replace_if_there(cleanup: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of torch that another release may lack: then there is nothing to see."""
    if hasattr(owner, name):
        replace(cleanup, owner, name, wrap)
