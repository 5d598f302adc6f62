"""The representative step: which one it is, which ranks are shown, and what each did when."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import (
    BACKWARD_NS,
    DATA_NS,
    FORWARD_NS,
    MS,
    OPTIMIZER_NS,
    TRANSFER_NS,
    Extra,
    SyntheticRun,
)
from hpcpace.diagnosis.measure import Selection, measure, panels_of
from hpcpace.diagnosis.plot_source import (
    lanes_of,
    regular_steps,
    representative_ranks,
    representative_step,
    slowest_step,
    step_detail,
)
from hpcpace.metrics.phases import Part
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase, StepFlag


def _measured(run: SyntheticRun, path):
    return measure(read_attempt(run.write(path).attempts()[-1]).traces, Selection())


def test_the_representative_step_is_nearest_to_the_median_of_regular_steps():
    times_ns = np.array([9.0, 5.0, 7.0, 6.9, 50.0])
    regular = regular_steps(np.array([0, 0, StepFlag.CHECKPOINT, 0, StepFlag.EVAL], np.uint8))
    assert regular.tolist() == [True, True, False, True, False]
    assert representative_step(times_ns, regular) == 3


def test_all_steps_are_regular_where_each_has_a_checkpoint():
    assert regular_steps(np.full(3, StepFlag.CHECKPOINT, np.uint8)).all()


def test_few_ranks_are_all_shown():
    assert representative_ranks(np.zeros(16), np.zeros(16, np.int64)).tolist() == list(range(16))


@each_case("num_roles", [1, 2, 4, 40, 400])
def test_of_many_ranks_the_extremes_and_the_typical_one_of_each_role_are_shown(num_roles):
    excess_ns = np.random.default_rng(num_roles).normal(0, 1, 400)
    excess_ns[[17, 230]], excess_ns[5] = (90, 80), -90
    role = np.arange(400) % num_roles
    shown = representative_ranks(excess_ns, role)
    assert len(shown) == len(set(shown.tolist())) == 16
    assert shown.tolist() == sorted(shown.tolist())
    assert {17, 230, 5} <= set(shown.tolist())
    typical = [np.abs(excess_ns[role == one]).min() for one in range(min(num_roles, 8))]
    assert set(typical) <= set(np.abs(excess_ns[shown]).tolist())


def test_a_lane_has_the_phases_in_their_order_and_length(tmp_path):
    offsets_ns = {rank: 7_000_000_000 * rank for rank in range(4)}
    measured = _measured(SyntheticRun(slow={2: 1.3}, offsets_ns=offsets_ns, halfwidth_ns=0), tmp_path / "run")
    lanes = lanes_of(measured, 3, np.array([0, 2]))
    extra_ns = 0.3 * (FORWARD_NS + BACKWARD_NS)
    expected = [
        (Part.DATA, DATA_NS),
        (Part.FORWARD, FORWARD_NS),
        (Part.BACKWARD, BACKWARD_NS),
        (Part.WAIT, extra_ns),
        (Part.TRANSFER, TRANSFER_NS),
        (Part.OPTIMIZER, OPTIMIZER_NS),
    ]
    assert [part for part, *_ in lanes[0]] == [part for part, _ in expected]
    lengths_ns = [end - begin for _, begin, end in lanes[0]]
    assert lengths_ns == pytest.approx([length for _, length in expected], abs=4000)
    assert [part for part, *_ in lanes[1]] == [part for part, _ in expected if part != Part.WAIT]


def _totals(lane):
    parts, begin_ns, end_ns = zip(*lane, strict=True)
    return np.bincount(parts, np.subtract(end_ns, begin_ns), len(Part))


def test_stretches_add_up_to_the_parts_of_the_step(tmp_path):
    measured = _measured(SyntheticRun(noise=0.1), tmp_path / "run")
    for row, lane in enumerate(lanes_of(measured, 5, np.arange(4))):
        np.testing.assert_allclose(_totals(lane), measured.parts[row, 5], atol=1)


def test_of_too_many_edges_cells_are_made_that_lose_little(tmp_path):
    measured = _measured(SyntheticRun(noise=0.1), tmp_path / "run")
    for row, lane in enumerate(lanes_of(measured, 5, np.arange(4), most_cells=5)):
        assert len(lane) <= 5
        assert _totals(lane).sum() == measured.parts[row, 5].sum()


def test_ranks_without_a_clock_end_with_the_others(tmp_path):
    run = SyntheticRun(num_ranks=2, hosts=("n1", "n2"), has_clock=False, offsets_ns={1: 10**15})
    measured = _measured(run, tmp_path / "run")
    assert measured.timed.unknown_clocks == (1,)
    first, second = lanes_of(measured, 0, np.arange(2))
    assert first[-1][2] == second[-1][2] < 100 * MS


def test_the_detail_has_the_slow_rank_with_the_largest_excess(tmp_path):
    measured = _measured(SyntheticRun(num_ranks=8, slow={6: 1.2}, noise=0.01), tmp_path / "run")
    detail = step_detail(measured, panels_of(measured))
    assert int(np.argmax(detail.excess_ns)) == 6
    assert detail.excess_ns[6] == pytest.approx(0.2 * (FORWARD_NS + BACKWARD_NS), rel=0.3)
    assert detail.parts_ns.shape == detail.mean_ns.shape == (8, len(Part))
    assert abs(detail.time_ns - detail.median_ns) < MS


def test_named_ranks_are_shown_before_others_with_a_large_excess():
    excess_ns = np.arange(100.0)
    shown = representative_ranks(excess_ns, np.zeros(100, np.int64), named=(20, 30))
    assert {0, 20, 30, 99} <= set(shown.tolist())
    assert len(shown) == 16


def test_the_slowest_step_is_one_without_checkpoint_or_evaluation(tmp_path):
    extras = (
        Extra(rank=1, length_ns=15 * MS, phase=Phase.DATA, every=23),
        Extra(rank=1, length_ns=90 * MS, phase=Phase.EVAL, every=17),
    )
    measured = _measured(SyntheticRun(extras=extras), tmp_path / "run")
    measured.chosen.flags[measured.chosen.step % 17 == 0] = StepFlag.EVAL
    detail = slowest_step(measured, panels_of(measured), named=(), most_cells=6400)
    assert detail.step == 23
    (data,) = [end - begin for part, begin, end in detail.lanes[1] if part == Part.DATA and end - begin > 2 * MS]
    assert data == pytest.approx(15 * MS, abs=MS + 4000)
    assert detail.time_ns - detail.median_ns == pytest.approx(15 * MS, abs=4000)


def test_lanes_together_have_no_more_stretches_than_cells(tmp_path):
    measured = _measured(SyntheticRun(num_ranks=8), tmp_path / "run")
    detail = slowest_step(measured, panels_of(measured), named=(), most_cells=32)
    assert sum(map(len, detail.lanes)) <= 32
