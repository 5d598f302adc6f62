from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.clock_suspects import pair_violations
from hpcpace.metrics.common_clock import CommonClock

HOUR_NS = 3600 * NS_PER_S


def table(local_ns, offset_ns, halfwidth_ns=1000, ref_rank=0):
    local_ns = np.asarray(local_ns, dtype=np.int64)
    return {
        "ref_rank": np.broadcast_to(ref_rank, local_ns.shape),
        "local_ns": local_ns,
        "offset_ns": np.asarray(offset_ns, dtype=np.int64),
        "halfwidth_ns": np.broadcast_to(halfwidth_ns, local_ns.shape),
    }


def drifting(times_ns, *, ppm, start_ns=5 * HOUR_NS, wander_ppm=0.0, period_s=600.0):
    """Return the true offset at times of a clock with set offset, drift and wander."""
    phase_ns = period_s * NS_PER_S / (2 * np.pi)
    wander_ns = wander_ppm * 1e-6 * phase_ns * np.sin(times_ns / phase_ns)
    return start_ns + np.rint(times_ns * (ppm * 1e-6) + wander_ns).astype(np.int64)


def test_a_steady_drift_is_taken_out_exactly_over_hours():
    samples_ns = np.arange(0, 5 * HOUR_NS, 30 * NS_PER_S, dtype=np.int64)
    clock = CommonClock.from_table(table(samples_ns, drifting(samples_ns, ppm=100)))
    times_ns = np.linspace(0, samples_ns[-1], 9973).astype(np.int64)
    found = clock.to_reference(times_ns)
    assert np.abs(found.time_ns - (times_ns - drifting(times_ns, ppm=100))).max() <= 2
    assert not found.extrapolated.any()
    assert found.time_ns.dtype == np.int64


def test_keeps_single_nanoseconds_of_days():
    base_ns = 30 * 24 * HOUR_NS
    clock = CommonClock.from_table(table([base_ns, base_ns + HOUR_NS], [-base_ns, -base_ns]))
    assert clock.to_reference([base_ns + 1, base_ns + 2]).time_ns.tolist() == [2 * base_ns + 1, 2 * base_ns + 2]


def test_begin_and_end_beat_an_offset_alone_ten_times():
    ends_ns = np.array([0, HOUR_NS])
    offsets_ns = drifting(ends_ns, ppm=20, wander_ppm=0.1)
    times_ns = np.arange(0, HOUR_NS, NS_PER_S)
    true_ns = times_ns - drifting(times_ns, ppm=20, wander_ppm=0.1)
    both = CommonClock.from_table(table(ends_ns, offsets_ns)).to_reference(times_ns).time_ns
    first = CommonClock.from_table(table(ends_ns[:1], offsets_ns[:1])).to_reference(times_ns).time_ns
    assert np.abs(first - true_ns).max() >= 10 * np.abs(both - true_ns).max()


@each_case("wander_ppm", [0.0, 0.5, 5.0])
def test_the_truth_lies_within_the_halfwidth_between_samples(wander_ppm):
    rng = np.random.default_rng(1)
    samples_ns = np.arange(0, HOUR_NS, 30 * NS_PER_S, dtype=np.int64)
    noise_ns = rng.integers(-1000, 1001, len(samples_ns))
    offsets_ns = drifting(samples_ns, ppm=100, wander_ppm=wander_ppm) + noise_ns
    times_ns = rng.integers(0, samples_ns[-1], 20000)
    found = CommonClock.from_table(table(samples_ns, offsets_ns)).to_reference(times_ns)
    errors_ns = np.abs(found.time_ns - (times_ns - drifting(times_ns, ppm=100, wander_ppm=wander_ppm)))
    assert np.mean(errors_ns <= found.halfwidth_ns) >= 0.99


def test_beyond_the_samples_it_is_flagged_and_wider():
    clock = CommonClock.from_table(table([0, 30 * NS_PER_S, 60 * NS_PER_S], [0, 3000, 6000]))
    found = clock.to_reference([-10 * NS_PER_S, 0, 60 * NS_PER_S, 70 * NS_PER_S, 80 * NS_PER_S])
    assert found.extrapolated.tolist() == [True, False, False, True, True]
    assert found.halfwidth_ns[1] == found.halfwidth_ns[2] == 1000
    assert 1000 < found.halfwidth_ns[3] < found.halfwidth_ns[4]
    assert found.time_ns[3] == 70 * NS_PER_S - 7000


def test_one_sample_is_an_offset_whose_error_grows_with_the_drift():
    clock = CommonClock.from_table(table([NS_PER_S], [500]))
    found = clock.to_reference([0, NS_PER_S, 3 * NS_PER_S])
    assert (found.time_ns + 500).tolist() == [0, NS_PER_S, 3 * NS_PER_S]
    assert found.halfwidth_ns.tolist() == [201_000.0, 1000.0, 401_000.0]
    assert found.extrapolated.tolist() == [True, False, True]


def test_without_a_sample_nothing_is_known():
    found = CommonClock.from_table(table([], [])).to_reference([1, 2])
    assert np.isinf(found.halfwidth_ns).all()
    assert found.extrapolated.all()


def test_the_reference_is_certain_everywhere():
    clock = CommonClock.from_table(table([0, NS_PER_S], [0, 0], halfwidth_ns=0))
    found = clock.to_reference([5, 2 * NS_PER_S])
    assert clock.is_reference
    assert found.time_ns.tolist() == [5, 2 * NS_PER_S]
    assert found.halfwidth_ns.tolist() == [0, 0]


def test_rows_may_come_in_any_order_and_twice():
    clock = CommonClock.from_table(table([20, 10, 20], [2, 1, 9]))
    assert (clock.local_ns.tolist(), clock.offset_ns.tolist()) == ([10, 20], [2 - 1, 2])


def test_refuses_two_reference_ranks():
    with pytest.raises(TraceError, match=r"\[0, 3\]"):
        CommonClock.from_table(table([1, 2], [0, 0], ref_rank=[0, 3]))


def test_residuals_measure_the_error_against_the_neighbours():
    clock = CommonClock.from_table(table([0, 10, 20, 30], [0, 100, 200, 290]))
    assert clock.residuals_ns().tolist() == [0, 5]
    assert CommonClock.from_table(table([0, 10], [0, 0])).residuals_ns().size == 0


def test_violations_are_counted_and_sized_by_pair_of_nodes():
    exit_node, enter_node = np.array([0, 0, 1, 0]), np.array([1, 1, 0, 1])
    first, second = pair_violations(exit_node, enter_node, np.array([95, 105, 7, 40]), np.full(4, 20.0))
    assert (first.exit_node, first.enter_node) == (0, 1)
    assert (first.num_violations, first.median_ns, first.max_ns, first.num_unexplained) == (3, 95, 105, 3)
    assert (second.exit_node, second.enter_node, second.num_violations, second.num_unexplained) == (1, 0, 1, 0)


def test_violations_within_what_is_allowed_are_explained():
    node = np.array([0, 1, 1])
    pairs = pair_violations(node, np.ones(3, np.int64), np.array([25, 15, 16]), np.array([25.0, 15.0, 15.0]))
    explained = {(pair.exit_node, pair.enter_node): pair.num_unexplained for pair in pairs}
    assert explained == {(0, 1): 0, (1, 1): 1}


def test_without_violations_there_are_no_pairs():
    none = np.zeros(0, np.int64)
    assert pair_violations(none, none, none, np.zeros(0)) == ()
