"""Synthetic traces obey causality, are the same through files, and hold the fault that they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cases import each_case

from experiments.score.generator import HALFWIDTH_NS, START_NS, clocks_of, traces_of, write_run
from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.timeline import COMPUTE_NS, noise_factors, simulate
from hpcpace.diagnosis.evidence import StepOperations, evidence_of
from hpcpace.metrics.common_clock import CommonClock, rank_clocks
from hpcpace.metrics.host_waits import core_use
from hpcpace.metrics.steps import common_steps
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import Op, Phase

SMALL = {"num_ranks": 16, "num_steps": 12, "ranks_per_node": 2}
LAYOUTS = {"dp": {}, "dp x pp": {"num_stages": 4}, "pp": {"num_stages": 16}}
FAULTS = ["none", "slow_rank", "slow_link", "contention", "periodic_service", "input_bound", "communication_bound"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def _scenario(layout: str, **values: object) -> Scenario:
    return Scenario(**{"seed": 4, **SMALL, **LAYOUTS[layout], **values})


def _evidence(traces: Sequence[RankTrace]) -> StepOperations:
    return evidence_of(traces, *rank_clocks(traces))


@layouts
@pytest.mark.parametrize("fault", FAULTS)
def test_steps_obey_causality_on_the_common_clock(layout: str, fault: str) -> None:
    evidence = _evidence(traces_of(_scenario(layout, fault=fault, size=0.2)))
    assert evidence.matching.is_matched.all()
    assert evidence.waits.negative_ns.max(initial=0) <= 2 * HALFWIDTH_NS + 512
    operations, matching = evidence.operations, evidence.matching
    received = operations.op == Op.RECV
    sent_ns = np.zeros(len(matching.starts), np.int64)
    sends = operations.op == Op.SEND
    sent_ns[matching.instance[sends]] = operations.enter_ns[sends]
    late_ns = sent_ns[matching.instance[received]] - operations.exit_ns[received]
    assert late_ns.max(initial=0) <= 2 * HALFWIDTH_NS + 512


@layouts
def test_rows_of_a_rank_follow_each_other(layout: str) -> None:
    for trace in traces_of(_scenario(layout)):
        steps, phases = trace.tables["steps"], trace.tables["phases"]
        assert (steps["end_ns"] > steps["begin_ns"]).all()
        assert (steps["begin_ns"][1:] == steps["end_ns"][:-1]).all()
        assert (phases["end_ns"] >= phases["begin_ns"]).all()
        assert (np.diff(phases["begin_ns"]) >= 0).all()
        assert (np.diff(trace.tables["collectives"]["exit_ns"]) >= 0).all()


@layouts
def test_computation_has_the_length_it_is_meant_to_have(layout: str) -> None:
    trace = traces_of(_scenario(layout, level=0.0, fault="slow_rank", size=0.5, target=0))[0]
    phases = trace.tables["phases"].select(trace.tables["phases"]["step"] == NUM_WARMUP)
    forward = phases.select(phases["phase"] == Phase.FORWARD)
    assert (forward["end_ns"] - forward["begin_ns"]).sum() == pytest.approx(1.5 * 33e6, rel=1e-4)


@each_case(("layout", "fault"), [("dp", "slow_rank"), ("dp", "hang"), ("dp x pp", "hang"), ("pp", "slow_rank")])
def test_traces_are_the_same_through_files(layout: str, fault: str, tmp_path: Path) -> None:
    num_stages = {"dp": 1, "dp x pp": 2, "pp": 4}[layout]
    scenario = _scenario(layout, num_ranks=4, num_stages=num_stages, fault=fault, size=0.2)
    found = read_attempt(write_run(scenario, tmp_path / "run").attempts()[0])
    assert found.problems == ()
    for read, kept in zip(found.traces, traces_of(scenario), strict=True):
        assert (read.header, read.closed_cleanly) == (kept.header, kept.closed_cleanly)
        for name in kept.tables:
            _assert_same_columns(read.tables[name], kept.tables[name])
        _assert_same_columns(read.open_collectives, kept.open_collectives)


def test_a_seed_gives_the_same_traces_again() -> None:
    first, second = (traces_of(_scenario("dp x pp", noise="heavy")) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        _assert_same_columns(one.tables["collectives"], other.tables["collectives"])


def test_recorded_offsets_are_within_their_half_width() -> None:
    scenario = _scenario("dp", clock_interval_s=0.5)
    clocks = clocks_of(scenario)
    for trace in traces_of(scenario):
        rows = trace.tables["clock"]
        true_ns = (rows["local_ns"] - START_NS - clocks.offset_ns[trace.header.node]) / (
            1 + clocks.drift[trace.header.node]
        )
        error_ns = rows["local_ns"] - START_NS - true_ns - rows["offset_ns"]
        assert np.abs(error_ns).max() <= rows["halfwidth_ns"].max() + 1


def test_a_clock_error_moves_one_innocent_node_only() -> None:
    values = {"fault": "slow_rank", "size": 0.2, "target": 3}
    good = traces_of(_scenario("dp", **values))
    bad = traces_of(_scenario("dp", clock_error_ns=3_000_000, **values))
    moved = {
        trace.header.node
        for trace, other in zip(bad, good, strict=True)
        if (trace.tables["clock"]["offset_ns"] - other.tables["clock"]["offset_ns"] == 3_000_000).all()
    }
    assert moved == {_scenario("dp", clock_error_ns=3_000_000, **values).clock_error_node}
    assert moved.isdisjoint({0, 1})


def test_the_slow_rank_enters_last() -> None:
    traces = traces_of(_scenario("dp", fault="slow_rank", size=0.5, target=5))
    operations = _evidence(traces).operations
    last = [int(operations.rank[of][operations.enter_ns[of].argmax()]) for of in _instances(operations.seq)]
    assert set(last) == {5}


def test_leaving_the_fault_out_changes_nothing_else() -> None:
    scenario = _scenario("dp", fault="slow_rank", size=0.5, target=5)
    healthy = simulate(_scenario("dp"))
    assert (simulate(scenario, with_fault=False).end == healthy.end).all()
    assert simulate(scenario).mean_step_ns > healthy.mean_step_ns * 1.2


@pytest.mark.parametrize("layout", ["dp", "dp x pp"])
def test_a_hang_leaves_all_but_the_target_inside(layout: str) -> None:
    traces = traces_of(_scenario(layout, fault="hang", target=6))
    inside = [trace.header.rank for trace in traces if len(trace.open_collectives)]
    assert inside == [rank for rank in range(16) if rank != 6]
    assert not any(trace.closed_cleanly for trace in traces)
    assert len(common_steps([trace.tables["steps"] for trace in traces])) == SMALL["num_steps"] + NUM_WARMUP


@each_case("noise", ["normal", "lognormal", "heavy", "periodic", "common_mode", "per_node"])
def test_noise_has_the_level_it_is_asked_for(noise: str) -> None:
    factors = noise_factors(_scenario("dp", num_steps=2000, num_ranks=64, noise=noise, level=0.05))
    assert factors.mean() == pytest.approx(1.0, abs=0.005)
    assert factors.std() == pytest.approx(0.05, rel=0.15)


@each_case(
    "values",
    [
        {"num_ranks": 9, "ranks_per_node": 2},
        {"num_stages": 3},
        {"fault": "slow_stage"},
        {"fault": "hang", "num_stages": 16},
        {"fault": "slow_link", "ranks_per_node": 16},
        {"fault": "slow_rank", "target": 16},
        {"fault": "gremlins"},
    ],
)
def test_refuses_scenarios_that_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Scenario(**{"seed": 0, **SMALL, **values})


def test_clocks_without_drift_agree_with_the_reference() -> None:
    traces = traces_of(_scenario("dp", max_drift_ppm=0.0))
    ends = [
        CommonClock.from_table(trace.tables["clock"]).to_reference(trace.tables["steps"]["end_ns"]).time_ns
        for trace in traces
    ]
    assert np.ptp(np.array(ends)[:, -1]) < 5_000_000


def _instances(seq: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(seq == number) for number in np.unique(seq)]


def _assert_same_columns(one: object, other: object) -> None:
    assert list(one) == list(other)
    for column in other:
        np.testing.assert_array_equal(one[column], other[column])


def test_ranks_beside_foreign_load_wait_for_cores_as_long_as_the_fault_says():
    scenario = Scenario(seed=5, num_ranks=16, num_steps=100, fault="foreign_load", size=0.5, target=1, level=0.0)
    traces = traces_of(scenario)
    steps = [trace.tables["steps"] for trace in traces]
    use = core_use(
        [trace.tables["host"] for trace in traces],
        [table["begin_ns"][NUM_WARMUP] for table in steps],
        [table["end_ns"][-1] for table in steps],
        [trace.header.cpus for trace in traces],
    )
    affected = np.isin(np.arange(16), scenario.affected_ranks)
    step_ns = np.mean([np.diff(table["end_ns"][NUM_WARMUP:]).mean() for table in steps])
    assert use.waiting[affected] == pytest.approx(0.5 * COMPUTE_NS / step_ns, rel=0.1)
    assert use.waiting[~affected].max() < 0.02
    assert use.cpus[0] == {0, 1, 2, 3}
