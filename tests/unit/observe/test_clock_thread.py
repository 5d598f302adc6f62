"""What all ranks do before a step that they agreed on, with comparisons of the clocks that are made by hand."""

from __future__ import annotations

import pytest

from hpcpace.core.errors import ClockSyncError
from hpcpace.observe.clock_thread import ClockThread
from hpcpace.world.clock import Agreement, ClockSample, Standing

_MANY = 1000


class _Sync:
    """Comparisons that agree on what a test says; all of them in the thread that trains."""

    timeout_s, broken, works_in_any_thread = 1.0, False, False

    def __init__(self) -> None:
        self.agreement: Agreement | None = None
        self.found: list[Agreement] = []

    def sync(self, standing: Standing, *, until_ns: int | None = None) -> ClockSample:
        self.agreement = self.found.pop(0)
        return ClockSample(0, 0, 0, 0, 0, 0)


class _Left(_Sync):
    """One comparison, and then the other rank has left; in a thread."""

    works_in_any_thread = True

    def sync(self, standing: Standing, *, until_ns: int | None = None) -> ClockSample:
        if not self.found:
            raise ClockSyncError("rank 1 has left")
        return super().sync(standing, until_ns=until_ns)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("ends_by_error", "leaves_together", "num_warnings"), [(True, True, 0), (False, True, 1), (False, False, 0)]
)
def test_that_a_rank_has_left_is_a_warning_unless_this_one_ends_by_it_or_alone(
    ends_by_error: bool, leaves_together: bool, num_warnings: int
) -> None:
    warnings: list[str] = []
    sync = _Left()
    sync.found = [_agreed(10, 1)]
    clocks = ClockThread(
        sync,
        add=lambda sample: None,
        notice=lambda: (0, 0, 0, 0),
        warn=warnings.append,
        leave_timeout_s=1.0,
        leaves_together=leaves_together,
    )
    clocks.start(0)
    clocks.close(in_order=not ends_by_error)
    expected = "clock comparisons stop: rank 1 has left; times of different hosts lose precision from here on"
    assert warnings == [expected] * num_warnings


def _thread(sync: _Sync) -> ClockThread:
    return ClockThread(
        sync,
        add=lambda sample: None,
        notice=lambda: (0, 0, 0, 0),
        warn=str,
        leave_timeout_s=1.0,
        leaves_together=True,
    )


def _agreed(step: int, number: int) -> Agreement:
    return Agreement(0, all_leave=False, step=step, notice=(number, 0, 0, 0))


def test_a_rank_behind_follows_what_those_ahead_have_followed_already() -> None:
    sync = _Sync()
    clocks = _thread(sync)
    sync.found = [_agreed(10, 1), _agreed(10, 1), _agreed(20, 2)]
    for _ in range(3):  # at the last, another rank has begun step 10; this one is in step 9
        clocks.start(9)
    heard = {step: clocks.begins(step, 1) for step in range(9, 22)}
    assert {step: notice[0] for step, notice in heard.items() if notice is not None} == {10: 1, 20: 2}


def test_of_several_that_it_passes_at_once_a_rank_follows_the_last() -> None:
    sync = _Sync()
    clocks = _thread(sync)
    sync.found = [_agreed(10, 1), _agreed(12, 2)]
    clocks.start(0)
    clocks.start(0)
    assert clocks.begins(15, 1) == (2, 0, 0, 0)
    assert clocks.begins(16, 1) is None


def test_a_rank_that_never_begins_a_step_keeps_a_bounded_number() -> None:
    sync = _Sync()
    clocks = _thread(sync)
    sync.found = [_agreed(step, step) for step in range(1, _MANY + 1)]
    for _ in range(_MANY):
        clocks.start(0)
    assert len(clocks._ahead) < _MANY
    assert clocks.begins(_MANY, 1) == (_MANY, 0, 0, 0)
