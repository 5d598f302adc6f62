"""Work in the streams of simulated devices, and how the times of one piece follow from those of others."""

from __future__ import annotations

from typing import Any


class Work:
    """Something in a stream: a kernel, a wait, a mark, or this rank's part of a collective.

    Attributes:
        label: what the program calls it.
        is_mark: whether it is the mark of an event, which takes no time.
        issue_ns: when the host issued it.
        begin_ns: when the stream came to it; None until that is known.
        end_ns: when the stream went on; None until that is known.
        idle_ns: how long the stream had nothing to do before it, because the host had issued nothing; 0 of a mark.
        held_ns: how long it held the stream because it waited for another stream or another rank.
    """

    __slots__ = (
        "_awaited", "_before", "_busy_until_ns", "_dependents", "_duration_ns", "_meeting", "_num_missing",
        "begin_ns", "end_ns", "held_ns", "idle_ns", "is_mark", "issue_ns", "label",
    )  # fmt: skip

    def __init__(
        self,
        before: Work | None,
        issue_ns: int,
        *,
        duration_ns: int = 0,
        awaited: Work | None = None,
        meeting: Meeting | None = None,
        label: Any = None,
        is_mark: bool = False,
    ) -> None:
        self.label, self.issue_ns, self.is_mark = label, issue_ns, is_mark
        self.begin_ns: int | None = None
        self.end_ns: int | None = None
        self.idle_ns = self.held_ns = self._busy_until_ns = 0
        self._before, self._awaited = before, awaited
        self._duration_ns, self._meeting = duration_ns, meeting
        self._dependents: list[Work] = []
        missing = [work for work in (before, awaited) if work is not None and work.end_ns is None]
        self._num_missing = len(missing)
        for work in missing:
            work._dependents.append(self)
        if not missing:
            _advance(self)

    def _ready_ns(self) -> int:
        """Take the times of what came before; return when nothing is waited for any more."""
        before = self._before
        self.begin_ns = self.issue_ns if before is None else max(self.issue_ns, known(before.end_ns))
        self._busy_until_ns = self.begin_ns if before is None else before._busy_until_ns
        ready_ns = max(self.begin_ns, 0 if self._awaited is None else known(self._awaited.end_ns))
        self._before = self._awaited = None  # else a stream would keep all that it ever did
        return ready_ns

    def _end(self, ready_ns: int) -> list[Work]:
        """Take the moment at which nothing is waited for; return what only waited for this."""
        self.held_ns = ready_ns - known(self.begin_ns)
        self.end_ns = ready_ns + self._duration_ns
        if not self.is_mark:
            self.idle_ns = known(self.begin_ns) - self._busy_until_ns
            self._busy_until_ns = self.end_ns
        freed = []
        for dependent in self._dependents:
            dependent._num_missing -= 1
            if not dependent._num_missing:
                freed.append(dependent)
        self._dependents = []
        return freed


class Meeting:
    """A collective: it begins when the last member is there."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._arrived: list[tuple[Work, int]] = []

    def arrive(self, work: Work, ready_ns: int) -> list[tuple[Work, int]]:
        """Return who can go on, and when: everybody, once everybody is there."""
        self._arrived.append((work, ready_ns))
        if len(self._arrived) < self._num_members:
            return []
        last_ns = max(ready_ns for _, ready_ns in self._arrived)
        return [(member, last_ns) for member, _ in self._arrived]


def _advance(work: Work) -> None:
    """Work out the times of a piece of work that nothing is missing for, and of all that follows from them."""
    waiting = [work]
    while waiting:
        work = waiting.pop()
        ready_ns = work._ready_ns()
        ready = [(work, ready_ns)] if work._meeting is None else work._meeting.arrive(work, ready_ns)
        for member, member_ready_ns in ready:
            waiting += member._end(member_ready_ns)


def known(time_ns: int | None) -> int:
    """Return a time that must be known by now."""
    assert time_ns is not None
    return time_ns
