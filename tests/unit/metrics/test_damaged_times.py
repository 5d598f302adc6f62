"""Times that damage has made absurd stay finite and within int64, without a warning."""

from __future__ import annotations

import numpy as np
from cases import each_case

from hpcpace.metrics.common_clock import CommonClock, reference_times

HOUR_NS = 3_600_000_000_000
MAX_NS = 1 << 60


def clock_of(local_ns: list[int], offset_ns: list[int]) -> CommonClock:
    width_ns = np.full(len(local_ns), 1000, np.int64)
    return CommonClock(
        local_ns=np.array(local_ns, np.int64), offset_ns=np.array(offset_ns, np.int64), halfwidth_ns=width_ns
    )


@each_case("change_ns", [HOUR_NS, -HOUR_NS, MAX_NS, -MAX_NS])
@each_case("times", [(CommonClock.to_reference, True), (reference_times, False)])
def test_a_rate_beyond_all_sense_extends_to_the_bound_only(change_ns, times):
    call, is_tuple = times
    found = call(clock_of([0, 1], [0, change_ns]), np.array([0, 10 * HOUR_NS]))
    time_ns = found.time_ns if is_tuple else found
    assert time_ns[0] == 0
    assert abs(float(time_ns[1])) <= MAX_NS + 10 * HOUR_NS


def test_residuals_of_samples_that_jump_are_finite():
    clock = clock_of([0, 1, HOUR_NS, 2 * HOUR_NS], [0, MAX_NS, -MAX_NS, 0])
    assert len(clock.residuals_ns()) == 2


def test_a_sound_clock_is_rounded_as_before():
    clock = clock_of([0, 1000], [0, 3])
    assert clock.to_reference(np.array([500, 2000])).time_ns.tolist() == [498, 1994]
