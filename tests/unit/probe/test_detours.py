"""Detours of a core and their period, on quanta whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from numpy.typing import NDArray

from hpcpace.probe.quanta import find_detours, find_period

_QUANTUM_NS = 50_000
_MS = 1_000_000
_SECOND = 1_000_000_000


def _marks(
    *,
    thief_ns: int = 0,
    period_ns: int = 0,
    random_ns: int = 0,
    num_random: int = 0,
    tick_ns: int = 0,
    span_s: float = 5.0,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Return marks of quanta that a periodic thief and random interruptions delay.

    Args:
        thief_ns: what the thief takes, each period_ns, with a jitter of 5 % of its length.
        random_ns: mean length of random interruptions.
        num_random: how many of them.
        tick_ns: what the kernel's clock takes, every 4 ms.
    """
    random = np.random.default_rng(seed)
    span_ns = int(span_s * _SECOND)
    begins = np.arange(period_ns // 3, span_ns, period_ns) if period_ns else np.zeros(0)
    stolen = [
        *zip(begins + random.normal(0, 0.05 * thief_ns, len(begins)), np.full(len(begins), thief_ns), strict=True)
    ]
    stolen += [*zip(random.uniform(0, span_ns, num_random), random.exponential(random_ns, num_random), strict=True)]
    ticks = np.arange(0, span_ns, 4 * _MS) if tick_ns else np.zeros(0)
    stolen += [*zip(ticks, np.full(len(ticks), tick_ns), strict=True)]
    stolen.sort()
    quanta = _QUANTUM_NS * (1 + np.abs(random.normal(0, 0.01, span_ns // _QUANTUM_NS)))
    ends, shift = np.cumsum(quanta), 0.0
    for at, length in stolen:
        quanta[min(np.searchsorted(ends, at - shift), len(quanta) - 1)] += length
        shift += length
    return np.cumsum(np.append(0, quanta)).astype(np.int64)


@each_case("share", [0.01, 0.05])
@each_case("period_ns", [10 * _MS, 100 * _MS, 333 * _MS])
@each_case("num_random", [0, 60])
def test_a_periodic_thief_is_found_with_its_period_and_share(share: float, period_ns: int, num_random: int) -> None:
    for seed in range(3):
        thief_ns = int(share * period_ns)
        marks = _marks(thief_ns=thief_ns, period_ns=period_ns, random_ns=100_000, num_random=num_random, seed=seed)
        found = find_period(find_detours(marks))
        assert found is not None
        assert found.period_ns == pytest.approx(period_ns, rel=0.01)
        assert found.share == pytest.approx(share, rel=0.2)


@each_case("share", [0.01, 0.05])
@each_case("period_ns", [10 * _MS, 100 * _MS, 333 * _MS])
def test_a_thief_that_comes_seldom_is_found_among_the_ticks_of_a_clock(share: float, period_ns: int) -> None:
    for seed in range(3):
        marks = _marks(thief_ns=int(share * period_ns), period_ns=period_ns, tick_ns=16_000, seed=seed)
        found = find_period(find_detours(marks))
        assert found is not None
        assert found.period_ns == pytest.approx(period_ns, rel=0.01)
        assert found.share == pytest.approx(share, rel=0.2)


@each_case("num_random", [0, 3, 30, 1000])
def test_random_interruptions_have_no_period(num_random: int) -> None:
    found = [find_period(find_detours(_marks(random_ns=400_000, num_random=num_random, seed=n))) for n in range(10)]
    assert found == [None] * 10


def test_a_quiet_core_loses_nothing() -> None:
    detours = find_detours(_marks())
    assert detours.share == 0
    assert len(detours.begin_ns) == 0
    assert detours.resolution_ns == pytest.approx(0.1 * _QUANTUM_NS, rel=0.01)


def test_detours_have_length_and_time() -> None:
    quanta = np.full(1000, _QUANTUM_NS)
    quanta[500] += 3 * _MS
    quanta[700:703] += _MS
    detours = find_detours(np.cumsum(np.append(0, quanta)))
    assert detours.begin_ns.tolist() == [500 * _QUANTUM_NS, 700 * _QUANTUM_NS + 3 * _MS]
    assert detours.lost_ns.tolist() == [3 * _MS, 3 * _MS]
    assert detours.share == pytest.approx(6 * _MS / (1000 * _QUANTUM_NS + 6 * _MS))


def test_an_excess_below_a_tenth_is_no_detour() -> None:
    quanta = np.full(1000, _QUANTUM_NS)
    quanta[::7] += _QUANTUM_NS // 11
    assert find_detours(np.cumsum(np.append(0, quanta))).share == 0


def test_three_interruptions_are_no_period_even_if_evenly_spaced() -> None:
    assert find_period(find_detours(_marks(thief_ns=_MS, period_ns=1700 * _MS))) is None


def test_a_long_interruption_in_the_phase_of_a_thief_does_not_count_as_its_own() -> None:
    marks = _marks(thief_ns=_MS, period_ns=100 * _MS)
    late = marks + np.where(np.arange(len(marks)) > np.searchsorted(marks, 100 * _MS // 3 + 1000 * _MS), 100 * _MS, 0)
    found = find_period(find_detours(late))
    assert found is not None
    assert found.share == pytest.approx(0.01, rel=0.2)
