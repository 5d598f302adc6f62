"""Steps that hpcpace finds by itself, brought into the recording: numbered at once, or when they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpcpace.observe.active import ActiveSession
from hpcpace.observe.step_source import StepSource
from hpcpace.trace.schema import StepFlag


class InferredSteps:
    """Ends the steps of a session as a StepFinder finds them; see there for `mark`, `settle` and the others.

    Args:
        active: the session.
        failed: takes an error of the recording, which must not reach the job.
    """

    def __init__(self, active: ActiveSession, *, failed: Callable[[Exception], None]) -> None:
        self._active, self._failed = active, failed
        self._marked: list[tuple[int, StepFlag]] = []  # samples and marks of the rows before each mark
        self._first = 0
        self._carried = (0, StepFlag.NONE)

    def mark(self) -> None:
        """Number rows provisionally: a step may have ended here."""
        with self._boundary():
            if not self._marked:
                self._first = self._active.step
                self._active.recording.hold_steps_after(self._first)
            self._active.recording.number_rows(self._first + len(self._marked) + 1)
            self._marked.append(self._take())

    def settle(self, steps: Sequence[int], ends_ns: Sequence[int]) -> None:
        """Number the rows between marks, and record the steps that are over."""
        with self._boundary():
            marked, self._marked = self._marked, []
            numbers = {self._first + mark: self._first + step for mark, step in enumerate(steps)}
            self._active.recording.settle_steps(numbers, self._first + steps[-1])
            totals = [(0, StepFlag.NONE)] * (len(ends_ns) + 1)
            totals[0] = self._carried
            for step, (samples, flags) in zip(steps, marked, strict=False):
                totals[step] = (totals[step][0] + samples, totals[step][1] | flags)
            for end_ns, (samples, flags) in zip(ends_ns, totals, strict=False):
                self._active.end_step(end_ns, samples, flags)
                self._active.begin_step(end_ns)
            self._carried = totals[-1]

    def end_step(self, end_ns: int) -> None:
        """End the step that is running."""
        with self._boundary():
            samples, flags = self._take()
            (carried, marks), self._carried = self._carried, (0, StepFlag.NONE)
            self._active.end_step(end_ns, samples + carried, flags | marks)
            self._active.begin_step()

    def tell_source(self, source: StepSource) -> None:
        """Record how steps are found from here on."""
        with self._boundary():
            self._active.recording.add_step_source(source)

    def _take(self) -> tuple[int, StepFlag]:
        phases = self._active.recording.phases
        return phases.samples.take(), phases.end_step()

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to somebody else's job
            self._failed(error)
