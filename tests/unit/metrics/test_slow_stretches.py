"""Stretches in which connections were slow: found where they are, and not in noise or in links that come and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.link_faults import StretchThresholds, _searched, slow_stretches
from tests.simulated_links import SimulatedLinks, simulate

_LEAST = float(np.log(1.3))


def searched(rates: list[float]) -> list[tuple[int, int]]:
    return sorted((first, stop) for first, stop, _ in _searched(np.log(rates), _LEAST, StretchThresholds()))


def test_a_stretch_is_found_wherever_it_is_and_however_often_without_the_samples_at_its_ends():
    well, slow = 190.0, 56.0
    table = {
        "the middle": ([well] * 8 + [slow] * 8 + [well] * 8, [(8, 16)]),
        "partial samples at its ends": ([well] * 8 + [110.0] + [slow] * 5 + [120.0] + [well] * 8, [(9, 14)]),
        "the beginning": ([slow] * 8 + [well] * 16, [(0, 8)]),
        "the end": ([well] * 16 + [slow] * 8, [(16, 24)]),
        "most of it": ([well] * 5 + [slow] * 15, [(5, 20)]),
        "twice": ([well] * 6 + [slow] * 4 + [well] * 6 + [slow] * 5 + [well] * 6, [(6, 10), (16, 21)]),
        "three samples": ([well] * 6 + [slow] * 3 + [well] * 6, [(6, 9)]),
        "two samples": ([well] * 6 + [slow] * 2 + [well] * 6, []),
        "stalls": ([well, well, 5.0, well] * 6, []),
        "a fifth slower": ([well] * 8 + [well / 1.2] * 8 + [well] * 8, []),
        "nothing": ([well] * 20, []),
        "few samples": ([well] * 2 + [slow] * 3, []),
        "none": ([], []),
    }
    assert {name: searched(rates) for name, (rates, _) in table.items()} == {
        name: expected for name, (_, expected) in table.items()
    }


def test_noise_has_no_stretches():
    random = np.random.default_rng(7)
    found = [
        searched(list(190 * np.exp(sd * random.standard_normal(60)))) for sd in (0.05, 0.2, 0.5) for _ in range(60)
    ]
    assert sum(bool(one) for one in found) <= 2


def test_connections_through_a_link_that_is_slow_for_a_while_have_its_stretch():
    job = SimulatedLinks(num_hosts=8, num_leaves=4, fault="slow", size=0.3, slow_s=((20, 40),), num_seconds=60)
    window = {"begin_ns": 2 * NS_PER_S, "end_ns": 60 * NS_PER_S, "rate_share": 0.3}
    run = simulate(job)
    (found, *_) = slow_stretches(run.flows, run.topology, **window)
    assert found.flow in ((1, 0), (2, 1))
    assert abs(found.begin_ns - 20 * NS_PER_S) <= NS_PER_S and abs(found.end_ns - 40 * NS_PER_S) <= 2 * NS_PER_S
    run = simulate(replace(job, fault="none"))
    assert slow_stretches(run.flows, run.topology, **window) == []
