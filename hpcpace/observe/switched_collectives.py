"""Observation of collectives that is switched off and on again while the job runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from hpcpace.observe.collectives import CollectiveObserver
from hpcpace.observe.compiled import CompiledObserver

Observer = CollectiveObserver | CompiledObserver


class SwitchedCollectives:
    """One observer after the other, each from where it is switched on to where it is switched off.

    Operations that are open when it is switched off are followed to their ends by the observer that saw them begin.

    Args:
        make: makes an observer that numbers the operations of each group from some number on. The first one counts
            from 0, unless it is switched on later than the recording.

    Attributes:
        current: the observer of this stretch, or of the last one.
    """

    def __init__(self, make: Callable[[int], Observer]) -> None:
        self._make = make
        self.current = make(0)
        self._is_on = False
        self._ending: list[Observer] = []

    def switch_on(self, first_number: int) -> None:
        """Begin to observe; operations of each group get numbers from this one on."""
        if first_number:
            self.current = self._make(first_number)
        self.current.install()
        self._is_on = True

    def switch_off(self) -> None:
        """Observe no further operations."""
        self.current.detach()
        self._ending.append(self.current)
        self._is_on = False

    def uninstall(self) -> None:
        """End; operations that are still open are recorded as never completed."""
        with ExitStack() as parts:
            for observer in {id(one): one for one in (*self._ending, self.current)}.values():
                parts.callback(observer.uninstall)

    def pause(self, *, is_paused: bool) -> None:
        """Observe nothing while hpcpace itself communicates."""
        self.current.paused = is_paused

    @property
    def has_open(self) -> bool:
        """Whether an operation is in flight, as far as operations are observed."""
        return self._is_on and self.current.has_open

    def take_last_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the last collective's group since the last call; empty without a collective."""
        return self.current.take_last_ranks()

    def open_collectives(self) -> list[tuple[int, ...]]:
        """Return rows of the operations that have not completed; called by the recorder at each flush."""
        observers = [*self._ending, *([self.current] if self._is_on else [])]
        # Those of one device are known to each of them.
        return list(dict.fromkeys(row for observer in observers for row in observer.open_collectives()))

    def entered(self) -> list[tuple[int, int, int, int]]:
        """Return how many operations were called in this stretch, or in the last one; see CollectiveObserver."""
        return self.current.entered()

    @property
    def is_complete(self) -> bool:
        """Whether every operation is observed now."""
        return self._is_on and not self.current.num_failures

    def end_step(self, step: int) -> None:
        """Record operations that nobody waits for."""
        if self._is_on:
            self.current.end_step(step)
        for observer in tuple(self._ending):
            observer.end_step(step)
            # What is pending on the device, the current one follows, too.
            if not (observer.has_open_on_host if self._is_on else observer.has_open):
                observer.uninstall()
                self._ending.remove(observer)
