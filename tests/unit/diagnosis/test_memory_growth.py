"""Memory that grows step by step is named with its slope and its end; warm-ups, jumps and caches are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.score.generator import traces_of
from experiments.score.scenario import Scenario
from hpcpace.diagnosis.finding import Case
from hpcpace.diagnosis.measure import Selection, measure, panels_of
from hpcpace.diagnosis.stops import GrowingMemory, GrowthThresholds, growing_memory, memory_limits, steady_growth
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.verdict import diagnose, verdict_of
from hpcpace.trace.tables import Table
from tests.machines.cases import CASES

MIB, GIB, S = 1 << 20, 1 << 30, 1_000_000_000
SECONDS = np.arange(120)
LIMITS = GrowthThresholds()


def grown(size_bytes):
    return steady_growth(np.arange(len(size_bytes)) * S, np.asarray(size_bytes, float), LIMITS)


def test_steady_growth_has_its_slope_and_what_only_looks_like_it_has_none():
    noise = np.random.default_rng(2).normal(0, 2 * MIB, 120)
    base = 3 * GIB + noise
    found = {
        "steady": base + 12 * MIB * SECONDS,
        "with evaluations that leak": base + 150 * MIB * (SECONDS // 10),
        "emptied a little": base + 12 * MIB * SECONDS - 6 * MIB * (SECONDS % 7),
    }
    none = {
        "constant": base,
        "small": base + 0.5 * MIB * SECONDS,
        "small for so much": 40 * GIB + base + 10 * MIB * SECONDS,
        "a warm-up": base + GIB * (1 - np.exp(-SECONDS / 15)),
        "a long warm-up": base + GIB * (1 - np.exp(-SECONDS / 50)),
        "one jump": base + GIB * (SECONDS > 60),
        "two jumps": base + GIB * (SECONDS // 50),
        "a saw": base + 40 * MIB * (SECONDS % 30),
        "falling": base - 5 * MIB * SECONDS,
        "a peak": base + GIB * (np.abs(SECONDS - 60) < 9),
        "it ends": base + 12 * MIB * np.minimum(SECONDS, 70),
    }
    assert {name for name, size in found.items() if grown(size) is None} == set()
    assert {name for name, size in none.items() if grown(size) is not None} == set()
    assert abs(grown(found["steady"]).bytes_per_s / (12 * MIB) - 1) < 0.02
    assert grown(found["steady"][:25]) is None


def with_memory(sizes, *, files=0.0, device=None):
    """Return measurements of four ranks on two hosts whose memory grows by so many bytes a second."""
    traces = []
    for trace, slope in zip(
        traces_of(Scenario(seed=4, num_ranks=4, ranks_per_node=2, num_steps=400)), sizes, strict=True
    ):
        host = trace.tables["host"]
        seconds = (host["time_ns"] - host["time_ns"][0]) / S
        size = (2 * GIB + slope * seconds).astype(np.int64)
        columns = {**host, "rss_bytes": size, "rss_file_bytes": (MIB + files * seconds).astype(np.int64)}
        if device is not None:
            columns["gpu_memory_bytes"] = (20 * GIB + device * slope * seconds).astype(np.int64)
        traces.append(replace(trace, tables={**trace.tables, "host": Table(columns)}))
    return measure(traces, Selection())


def growing(measured, limits=()) -> tuple[GrowingMemory, ...]:
    return growing_memory(measured.timed, measured.chosen, dict(limits), LIMITS)


def verdict(measured, limits=()):
    case = Case(panels=panels_of(measured), memory=growing(measured, limits))
    return verdict_of(diagnose(case), hosts=dict(enumerate(case.panels.host)))


def test_the_rank_that_grows_is_named_with_its_slope_per_step():
    found = verdict(with_memory([0, 0, 0, 20 * MIB]))
    assert (found.mode, found.variety, [each.id for each in found.culprits]) == (Mode.MEMORY, "process", ["3"])
    step_s = 0.11
    assert abs(found.findings[0].numbers["bytes_per_step"] / (20 * MIB * step_s) - 1) < 0.1
    assert found.headline.startswith("memory grows: memory of rank 3 on n2 by 2.")
    assert found.headline.endswith(" MiB a step")
    assert "tracemalloc" in found.next[0]


def test_where_limits_are_known_it_says_when_they_are_reached_by_all_ranks_of_the_host():
    limits, measured = dict.fromkeys((2, 3), 24 * GIB), with_memory([0, 0, 10 * MIB, 30 * MIB])
    first, second = growing(measured, limits)
    assert (first.rank, second.rank, first.full_step) == (3, 2, second.full_step)
    # Both together use up 24 GiB less the 4 GiB of the begin and what they have grown by.
    since_begin_s = (24 * GIB - 4 * GIB) / (40 * MIB)
    assert abs(first.full_step / (since_begin_s / 0.108) - 1) < 0.05
    assert "24 GiB of n2 are full at step ~" in verdict(measured, limits).headline


def test_the_limit_is_that_of_the_cgroup_or_the_memory_of_the_host(tmp_path):
    snapshot = next(one for name, case in CASES.items() for one in case.snapshots(tmp_path / name) if one.ranks)
    kernel, first = replace(snapshot.kernel, memory_bytes=24 * GIB), snapshot.ranks[0]
    sizes = {0: 0, 1: 8 * GIB, 2: 1 << 62, 3: None}
    ranks = tuple(replace(first, rank=rank, memory_max_bytes=size) for rank, size in sizes.items())
    found = memory_limits([replace(snapshot, kernel=kernel, ranks=ranks)])
    assert found == {0: 24 * GIB, 1: 8 * GIB, 2: 24 * GIB, 3: 24 * GIB}
    assert memory_limits([replace(snapshot, kernel=replace(kernel, memory_bytes=None), ranks=ranks[:1])]) == {}


def test_all_ranks_are_nobody_in_particular_and_devices_have_a_finding_of_their_own():
    everywhere = verdict(with_memory([10 * MIB] * 4, device=4.0))
    assert everywhere.culprits == ()
    assert "memory of all 4 ranks by up to" in everywhere.headline
    assert [finding.variety for finding in everywhere.findings] == ["process", "device"]
    assert "device memory of all 4 ranks" in everywhere.also[0]


def test_pages_of_mapped_files_are_no_growth():
    assert growing(with_memory([20 * MIB] * 4, files=20 * MIB)) == ()
