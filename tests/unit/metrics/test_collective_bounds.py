"""Clocks from collectives alone, against clocks of known truth."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.clock_suspects import collective_bounds


def collectives(
    offset_ns: int, *, drift_ppm: float = 0.0, num: int = 400, late_ns: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Return enter and exit of a rank whose clock is off and that comes later, and those of the reference."""
    rng = np.random.default_rng(7)
    ready = np.cumsum(rng.uniform(5e6, 15e6, num)) + rng.exponential(1e6, (2, num))
    ready[1] += late_ns
    exit_ = ready.max(axis=0) + rng.uniform(50e3, 400e3, (2, num))
    local = [times + offset_ns + times * drift_ppm * 1e-6 for times in (ready[1], exit_[1])]
    return tuple(times.astype(np.int64) for times in (*local, ready[0], exit_[0]))


@each_case("offset_ns", [0, -3_000_000, 5_000_000_000_000])
def test_the_true_offset_is_within_the_half_width(offset_ns: int) -> None:
    found = collective_bounds(*collectives(offset_ns))
    assert found is not None and found.contradiction_ns == 0
    assert (np.abs(found.offset_ns - offset_ns) <= found.halfwidth_ns).all()
    assert found.halfwidth_ns.max() < 1_000_000


@pytest.mark.parametrize("late_ns", [-10e6, 10e6])
def test_a_rank_that_is_always_late_does_not_shift_the_clock(late_ns: float) -> None:
    found = collective_bounds(*collectives(37_000_000, late_ns=late_ns))
    assert found is not None and found.contradiction_ns == 0
    assert (np.abs(found.offset_ns - 37_000_000) <= found.halfwidth_ns).all()
    assert found.halfwidth_ns.max() < 700_000  # the transfers, and what ranks leave apart


def test_the_transfer_of_a_third_rank_says_how_long_ranks_can_leave_apart() -> None:
    enter_ns, exit_ns, other_enter_ns, other_exit_ns = collectives(0, late_ns=0)
    early = (enter_ns - 20_000_000, exit_ns, other_enter_ns - 20_000_000, other_exit_ns)
    alone, with_third = collective_bounds(*early), collective_bounds(*early, np.full(len(enter_ns), 400_000))
    assert alone is not None and with_third is not None
    assert np.abs(with_third.offset_ns).max() < 400_000
    assert alone.halfwidth_ns.min() > 20_000_000 > 750_000 >= with_third.halfwidth_ns.max()


def test_a_rank_that_waits_and_is_woken_up_late_makes_the_half_width_larger() -> None:
    rng = np.random.default_rng(3)
    last = np.cumsum(rng.uniform(5e6, 15e6, 400))
    own = (last, last + 30_000)
    other = (last - 5e6, last + 30_000 + rng.exponential(200_000, 400))
    found = collective_bounds(*(times.astype(np.int64) for times in (*own, *other)))
    assert found is not None
    assert (np.abs(found.offset_ns) <= found.halfwidth_ns).mean() > 0.9
    assert found.halfwidth_ns.max() < 600_000


def test_a_drifting_clock_is_followed() -> None:
    found = collective_bounds(*collectives(0, drift_ppm=50))
    assert found is not None and found.contradiction_ns == 0
    truth = found.local_ns * 50e-6
    assert (np.abs(found.offset_ns - truth) <= found.halfwidth_ns + 10_000).all()


def test_operations_of_another_run_contradict_each_other() -> None:
    own, other = collectives(0), collectives(0)
    found = collective_bounds(own[0], own[1], other[2][::-1], other[3][::-1])
    assert found is not None and found.contradiction_ns > 1_000_000


def test_without_a_common_operation_nothing_is_said() -> None:
    nothing = np.zeros(0, np.int64)
    assert collective_bounds(nothing, nothing, nothing, nothing) is None
