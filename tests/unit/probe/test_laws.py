"""Laws of latency and rate: fitted to curves whose pieces are known, and to a published curve of 16 GPUs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cases import each_case
from numpy.typing import NDArray

from hpcpace.probe.laws import choose_pieces, fit_law, fit_pieces
from hpcpace.probe.record import LatencyLaw

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
SIZES = [4**power for power in range(3, 14)]
FloatArray = NDArray[np.float64]


def three_pieces(size_bytes: FloatArray) -> FloatArray:
    """Return a curve that switches at 32 KiB, with a jump, and at 2 MB."""
    first, second, third = 20e3 + 0.5 * size_bytes, 60e3 + 0.2 * size_bytes, 200e3 + 0.1 * size_bytes
    return np.where(size_bytes < 32768, first, np.where(size_bytes < 2e6, second, third))


def one_piece(size_bytes: FloatArray) -> FloatArray:
    return 30e3 + 0.08 * size_bytes


def repeated(times_ns: FloatArray, noise: float, seed: int = 1) -> list[list[FloatArray]]:
    rng = np.random.default_rng(seed)
    return [[time_ns * rng.normal(1, noise, 20) for _ in range(5)] for time_ns in times_ns]


def law_of(rounds_ns: list[list[FloatArray]], sizes: list[int] = SIZES) -> LatencyLaw:
    law = fit_law(sizes, rounds_ns, op="all_reduce", num_nodes=2, num_ranks=2)
    assert law is not None
    return law


def test_switch_points_and_terms_of_a_known_curve_are_found_within_their_intervals() -> None:
    law = law_of(repeated(three_pieces(np.array(SIZES, float)), noise=0.02))
    assert [piece.from_bytes for piece in law.pieces] == pytest.approx([0, 32768, 1.4e6], rel=0.15)
    for piece, latency_ns, ns_per_byte in zip(law.pieces, (20e3, 60e3, 200e3), (0.5, 0.2, 0.1), strict=True):
        assert piece.latency_ns == pytest.approx(latency_ns, rel=0.03)
        assert piece.ns_per_byte == pytest.approx(ns_per_byte, rel=0.03)
        assert piece.latency_low_ns <= piece.latency_ns <= piece.latency_high_ns
        assert piece.ns_per_byte_low <= piece.ns_per_byte <= piece.ns_per_byte_high
    assert law.pieces[2].from_low_bytes <= 2e6 <= law.pieces[2].from_high_bytes


def test_a_straight_line_has_one_piece_whatever_the_noise() -> None:
    for seed in range(20):
        rounds_ns = repeated(one_piece(np.array(SIZES, float)), noise=0.05, seed=seed)
        assert len(law_of(rounds_ns).pieces) == 1


def test_intervals_hold_the_truth_in_nearly_all_draws() -> None:
    inside = 0
    for seed in range(40):
        (piece,) = law_of(repeated(one_piece(np.array(SIZES, float)), noise=0.05, seed=seed)).pieces
        inside += piece.latency_low_ns <= 30e3 <= piece.latency_high_ns
        inside += piece.ns_per_byte_low <= 0.08 <= piece.ns_per_byte_high
    assert inside >= 72


def test_one_latency_and_one_rate_miss_a_curve_with_a_switch() -> None:
    law = law_of(repeated(three_pieces(np.array(SIZES, float)), noise=0.0))
    assert law.single_least_error < -0.4 and law.single_most_error > 0.2
    assert law.least_error > -0.01 and law.most_error < 0.01


def test_drift_between_rounds_widens_the_intervals() -> None:
    times_ns = one_piece(np.array(SIZES, float))
    steady = [[time_ns * np.ones(20) for _ in range(5)] for time_ns in times_ns]
    drifting = [[time_ns * np.full(20, 1 + 0.05 * number) for number in range(5)] for time_ns in times_ns]
    assert law_of(steady).pieces[0].latency_low_ns == pytest.approx(law_of(steady).pieces[0].latency_high_ns)
    (piece,) = law_of(drifting).pieces
    assert piece.latency_high_ns / piece.latency_low_ns > 1.05


def test_no_latency_and_no_rate_is_negative() -> None:
    falling = np.array([100e3, 90e3, 80e3, 70e3])
    fit = fit_pieces(np.array([1.0, 10.0, 100.0, 1000.0]), falling[np.newaxis], 1)
    assert fit.ns_per_byte[0, 0] == 0 and fit.latency_ns[0, 0] > 0
    convex = np.array([1e3, 10e3, 120e3, 1.3e6])
    fit = fit_pieces(np.array([100.0, 1000.0, 1e4, 1e5]), convex[np.newaxis], 1)
    assert fit.latency_ns[0, 0] >= 0 and fit.ns_per_byte[0, 0] > 0


@each_case("num_sizes", [1, 2, 3])
def test_too_few_sizes_have_no_law(num_sizes: int) -> None:
    rounds_ns = repeated(one_piece(np.array(SIZES[:num_sizes], float)), noise=0.01)
    assert fit_law(SIZES[:num_sizes], rounds_ns, op="broadcast", num_nodes=2, num_ranks=2) is None


def test_every_piece_but_that_of_a_single_one_has_three_sizes() -> None:
    times_ns = np.array([1.0, 5.0, 2.0, 9.0, 4.0, 12.0, 3.0, 15.0]) * 1e4
    fit = choose_pieces(np.array(SIZES[:8], float), times_ns)
    begins = [*fit.first[0].tolist(), 8]
    assert all(end - begin >= 3 for begin, end in pairwise(begins))


@pytest.mark.parametrize(
    ("curve", "single", "pieces", "most_error"),
    [("a100", (-0.352, 0.268), 5, 0.065), ("h100", (-0.736, 0.242), 4, 0.095)],
)
def test_pieces_fit_published_curves_of_16_gpus_that_one_latency_and_one_rate_miss(
    curve: str, single: tuple[float, float], pieces: int, most_error: float
) -> None:
    rows = [line.split(",") for line in (PUBLISHED / "nccl_all_reduce_16_gpus.csv").read_text().split()[1:]]
    sizes = [int(size) for name, size, _ in rows if name == curve]
    rounds_ns = [[np.array([1000 * float(time_us)])] for name, _, time_us in rows if name == curve]
    law = fit_law(sizes, rounds_ns, op="all_reduce", num_nodes=2, num_ranks=16, num_draws=2)
    assert law is not None
    assert (law.single_least_error, law.single_most_error) == pytest.approx(single, abs=0.001)
    assert len(law.pieces) == pieces
    assert -most_error < law.least_error and law.most_error < most_error
