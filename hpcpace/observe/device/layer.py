"""All that observes this rank's device, and what torch's backends do there unseen.

NCCL's habits were read from torch 2.11 to 2.13; none of them could be tried on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from hpcpace.core.compat import device_backend, has_context, stream_reader
from hpcpace.observe.device.clock import DeviceClock, DeviceMarks
from hpcpace.observe.device.times import DeviceTimes, SideStreams
from hpcpace.observe.guest import replace
from hpcpace.trace.recorder import Recorder

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
    return device_backend(process_group) in _HOST_BACKENDS


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


class DeviceLayer:
    """Observes a device for a recorder.

    Args:
        clock: makes and maps marks.

    Attributes:
        marks: those of phases and steps.
        times: those of operations; there once a recorder is.
    """

    times: DeviceTimes

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.marks = DeviceMarks(clock)

    def record_into(self, recorder: Recorder) -> None:
        """Give the recorder operations, and the device's times of its steps and phases."""
        recorder.device_ns = self.marks.device_ns
        self.times = DeviceTimes(self._clock, recorder.add_collective)

    def start(self, cleanup: ExitStack) -> None:
        """Tie the device's clock to the host's if the device is in use, and follow captures until the stack closes."""
        follow_captures(cleanup, self._clock)
        self._clock.anchor()

    def end_step(self, number: int, *, is_shared: bool) -> None:
        """Tie the clocks together again where that is due.

        A rank that waits for its device delays all others, and thousands of ranks that do so one after the other delay
        every step. Ranks that compare their clocks therefore do it in the same steps: where they compare them, and
        before that after 1, 2, 4, 8 steps and so on.

        Args:
            number: steps so far.
            is_shared: whether the ranks compare their clocks, and call `anchor` where they do.
        """
        clock = self._clock
        is_power_of_two = number & (number - 1) == 0
        is_due = (is_power_of_two and clock.is_settling) or clock.has_moved if is_shared else clock.is_due
        if is_due:
            self.anchor()

    def anchor(self) -> None:
        """Tie the clocks together; it waits for the device."""
        self._clock.anchor(self._resolve)

    def end(self, *, in_order: bool) -> tuple[int, str]:
        """Read the last marks; return the number of captured operations, and how times were found, in words.

        Args:
            in_order: whether the job has ended in order; otherwise the device may hang, and is not waited for.
        """
        if in_order:
            self.anchor()
        self._resolve()
        marks, times = self.marks, self.times
        text = (
            f"marks: {marks.num_known} known, {marks.num_unknown} not made; "
            f"operations: {times.num_captured} captured in graphs, {times.num_refused} without an event"
        )
        return times.num_captured, text

    def _resolve(self) -> None:
        self.marks.resolve()
        self.times.resolve()


def find_device(warn: Callable[[str], None]) -> DeviceClock | None:
    """Return what marks the streams of this rank's GPU; None if torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None

    in_use: set[int] = set()

    def current_device() -> int | None:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        device = torch.cuda.current_device()
        # A rank that computes on the CPU although there is a GPU must not get a context there, which takes memory.
        if device not in in_use and has_context(device):
            in_use.add(device)
        return device if device in in_use else None

    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),
        current_device=current_device,
        current_stream=stream_reader(),
        warn=warn,
    )
