"""All that observes this rank's device, started and ended in order: clock, marks of phases and steps, operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from hpcpace.observe.device_clock import DeviceClock
from hpcpace.observe.device_marks import DeviceMarks
from hpcpace.observe.device_times import DeviceTimes
from hpcpace.observe.nccl_habits import follow_captures
from hpcpace.trace.recorder import Recorder


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
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)

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
        current_stream=torch._C._cuda_getCurrentRawStream,
        warn=warn,
    )
