"""The search for the pacing point: what a rank sees in the first steps after the warm-up, when no rank is delayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcpace.pace.mechanisms import RankProfile
from hpcpace.pace.pacing_points import CandidateLog, PointCandidate


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What each rank sends to all others once, before they choose the pacing point.

    Attributes:
        candidates: operations on which it was blocked exactly once in every step.
        profile: how it runs and waits.
        seed: a number; all ranks use that of rank 0.
    """

    candidates: list[PointCandidate]
    profile: RankProfile
    seed: int


class PointSearch:
    """Notes where this rank is blocked, over a number of steps.

    Args:
        first_step: the first of these steps.
        num_steps: how many there are.
        profile: what is known of this rank beforehand.
        thread_clock: processor time of the calling thread in nanoseconds.

    Attributes:
        is_open: whether one of these steps is running.
        profile: what is known of this rank.
    """

    def __init__(
        self, *, first_step: int, num_steps: int, profile: RankProfile, thread_clock: Callable[[], int]
    ) -> None:
        self.is_open = False
        self.profile = profile
        self._first_step, self._num_steps = first_step, num_steps
        self._thread_clock = thread_clock
        self._log = CandidateLog()
        self._polled_ns = self._waited_ns = self._steps_ns = self._collected_ns = 0

    def note_wait(self, name: str, ranks: tuple[int, ...], *, own_ns: int, thread_ns: int) -> None:
        """Take a wait that has ended; `thread_ns` is the thread clock's reading when it began."""
        self._log.add(name, ranks, own_ns)
        self._polled_ns += self._thread_clock() - thread_ns
        self._waited_ns += own_ns

    def forget(self) -> None:
        """Drop all candidates: this rank cannot be paced."""
        self._log = CandidateLog()

    def end_step(self, step: int, duration_ns: int, collected_ns: int) -> bool:
        """Take a step that has ended; return whether it was the last of the search.

        Args:
            step: its number.
            duration_ns: how long it took.
            collected_ns: time of all full garbage collections so far.
        """
        if self.is_open:
            self._steps_ns += duration_ns
        else:
            self._collected_ns = collected_ns
        end_step = self._first_step + self._num_steps
        self.is_open = self._first_step <= step + 1 < end_step
        if step + 1 < end_step:
            return False
        self.profile = self.profile.measured(
            polling_share=self._polled_ns / max(self._waited_ns, 1),
            gc_share=(collected_ns - self._collected_ns) / max(self._steps_ns, 1),
        )
        return True

    def report(self, seed: int) -> RankReport:
        """Return what this rank sends to the others at the end of the search."""
        return RankReport(candidates=self._log.regular(self._num_steps), profile=self.profile, seed=seed)
