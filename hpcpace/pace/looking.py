"""The first steps after the warm-up, in which nobody is held back: what a rank sees there, and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpcpace.pace.mechanisms import RankFacts
from hpcpace.pace.points import Seen, SeenLog


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What each rank tells the others once, when the pacing point is chosen.

    Attributes:
        seen: operations at which it was blocked once in every step.
        facts: about itself.
        seed: a number; that of rank 0 is the one that all use.
    """

    seen: list[Seen]
    facts: RankFacts
    seed: int


class Look:
    """Takes notes of some steps.

    Args:
        begin_step: the first of them.
        num_steps: how many.
        facts: what is known of this rank beforehand.
        thread_clock: processor time of the calling thread in nanoseconds.

    Attributes:
        is_open: whether a step of them is running.
        facts: what is known of this rank.
    """

    def __init__(self, *, begin_step: int, num_steps: int, facts: RankFacts, thread_clock: Callable[[], int]) -> None:
        self.is_open = False
        self.facts = facts
        self._begin_step, self._num_steps = begin_step, num_steps
        self._thread_clock = thread_clock
        self._log = SeenLog()
        self._polled_ns = self._waited_ns = self._steps_ns = self._collected_ns = 0

    def note_wait(self, name: str, ranks: tuple[int, ...], *, own_ns: int, thread_ns: int) -> None:
        """Take a wait that has ended; `thread_ns` is what the thread clock showed when it began."""
        self._log.add(name, ranks, own_ns)
        self._polled_ns += self._thread_clock() - thread_ns
        self._waited_ns += own_ns

    def forget(self) -> None:
        """See nothing: this rank cannot be paced."""
        self._log = SeenLog()

    def end_step(self, step: int, duration_ns: int, collected_ns: int) -> bool:
        """Take a step that has ended; return whether it was the last one.

        Args:
            step: its number.
            duration_ns: how long it took.
            collected_ns: time of all full garbage collections so far.
        """
        if self.is_open:
            self._steps_ns += duration_ns
        else:
            self._collected_ns = collected_ns
        self.is_open = self._begin_step <= step + 1 < self._begin_step + self._num_steps
        if step + 1 < self._begin_step + self._num_steps:
            return False
        self.facts = self.facts.seen(
            polling_share=self._polled_ns / max(self._waited_ns, 1),
            gc_share=(collected_ns - self._collected_ns) / max(self._steps_ns, 1),
        )
        return True

    def introduction(self, seed: int) -> Introduction:
        """Return what there is to tell at the end."""
        return Introduction(seen=self._log.regular(self._num_steps), facts=self.facts, seed=seed)
