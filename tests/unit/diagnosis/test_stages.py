"""Runs of known truth: which rank is late, in which stage, and what is said of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import MS, Extra, SyntheticRun
from hpcpace.diagnosis.analyze import examine
from hpcpace.metrics.roles import Stage
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import ENQUEUE_COLUMN, OTHER_WITHOUT_GRADIENTS, Phase
from hpcpace.trace.tables import Table


def traces(folder, **truth):
    run = SyntheticRun(**{"num_steps": 80, "noise": 0.02, **truth}).write(folder / "run")
    return read_attempt(run.attempts()[0]).traces


def verdict_on(folder, **truth):
    return examine(traces(folder, **truth))


def slow_in(phase, *, rank=1, length_ns=15 * MS, **more):
    return Extra(rank=rank, length_ns=length_ns, phase=phase, spread=0.2, **more)


CLOCKS, WORKERS = "clock speeds", "workers"


@each_case(
    ("truth", "rank", "stage", "said", "advised", "not_advised"),
    [
        ({"extras": (slow_in(Phase.DATA),)}, 1, Stage.DATA, "data loading of rank 1: ", WORKERS, CLOCKS),
        ({"slow": {2: 1.4}}, 2, Stage.COMPUTE, "backward of rank 2: ", CLOCKS, WORKERS),
        ({"extras": (slow_in(Phase.GC, rank=3),)}, 3, Stage.COLLECTION, "collection of rank 3: ", "gc.freeze", CLOCKS),
        ({"extras": (slow_in(None, rank=0),)}, 0, Stage.NO_PHASE, "outside all phases of rank 0: ", "loading", CLOCKS),
        (
            {"extras": (slow_in(Phase.OTHER),), "phase_source": OTHER_WITHOUT_GRADIENTS},
            *(1, Stage.NO_PHASE, "modules without gradients", "without gradients: a rollout", CLOCKS),
        ),
        # Files of other tools, and blocks that a script names, have `other` for anything.
        ({"extras": (slow_in(Phase.OTHER),)}, 1, Stage.NO_PHASE, "outside all phases of rank 1: ", "script", CLOCKS),
    ],
)
def test_a_straggler_is_named_with_its_stage_and_advice_that_fits(
    tmp_path, truth, rank, stage, said, advised, not_advised
):
    verdict = verdict_on(tmp_path, **truth)
    first = verdict.findings[0]
    assert (verdict.mode, first.culprits[0].id) == ("persistent straggler", str(rank))
    assert [found.stages for found in first.stages] == [(stage,)]
    assert any(sentence.startswith(said) or said in sentence for sentence in verdict.why)
    assert advised in verdict.next[0] and not_advised not in verdict.next[0]
    assert len(verdict.findings) == 1


def test_the_figures_of_a_stage_are_those_of_the_run(tmp_path):
    verdict = verdict_on(tmp_path, extras=(slow_in(Phase.DATA, length_ns=20 * MS),))
    largest = verdict.findings[0].stages[0].phases[0]
    assert (largest.phase, largest.usual_ns) == ("data", pytest.approx(1 * MS))
    assert largest.own_ns == pytest.approx(21 * MS, rel=0.1)
    assert largest.interval_ns[0] < largest.own_ns - largest.usual_ns < largest.interval_ns[1]
    assert largest.interval_ns[0] < 20 * MS < largest.interval_ns[1]


def test_two_slow_stages_of_a_rank_are_both_named(tmp_path):
    verdict = verdict_on(tmp_path, extras=(slow_in(Phase.DATA),), slow={1: 1.5})
    assert set(verdict.findings[0].stages[0].stages) == {Stage.DATA, Stage.COMPUTE}
    assert CLOCKS in verdict.next[0] and WORKERS in verdict.next[0]


def test_two_slow_ranks_have_a_stage_each(tmp_path):
    verdict = verdict_on(tmp_path, num_ranks=8, extras=(slow_in(Phase.DATA),), slow={2: 1.5})
    found = {c.id: s.stages for c, s in zip(verdict.findings[0].culprits, verdict.findings[0].stages, strict=True)}
    assert found == {"1": (Stage.DATA,), "2": (Stage.COMPUTE,)}


@each_case("seed", range(4))
def test_an_excess_that_moves_between_stages_names_none(tmp_path, seed):
    """Each block of steps is slow in another phase: none holds most of the excess."""
    phases = (Phase.DATA, Phase.FORWARD, Phase.GC, None)
    lengths = np.random.default_rng(seed).permutation(4)
    extras = tuple(
        Extra(rank=1, length_ns=8 * MS, phase=phase, every=1, spread=6.0) for phase in np.array(phases, object)[lengths]
    )
    first = verdict_on(tmp_path, num_steps=30, extras=extras).findings[0]
    assert first.stages[0] is not None
    named = first.stages[0].stages
    assert len(named) != 1, "one stage of four alike was blamed alone"


def test_without_a_fault_nothing_is_claimed(tmp_path):
    verdict = verdict_on(tmp_path)
    assert (verdict.mode, verdict.findings) == ("healthy", ())


def test_phases_of_the_host_are_not_taken_for_those_of_a_gpu(tmp_path):
    on_device = [
        dataclasses.replace(
            trace,
            tables={
                **trace.tables,
                "collectives": Table(
                    {**trace.tables["collectives"], ENQUEUE_COLUMN: trace.tables["collectives"]["enter_ns"]}
                ),
            },
        )
        for trace in traces(tmp_path, extras=(slow_in(Phase.DATA),))
    ]
    verdict = examine(on_device)
    assert (verdict.mode, verdict.findings) == ("cannot tell", ())
    assert "host times" in verdict.headline


def test_a_rank_without_forward_phases_may_be_slow_in_its_forward_pass(tmp_path):
    found = traces(tmp_path, extras=(slow_in(None),))
    without = [
        dataclasses.replace(
            trace,
            tables={
                **trace.tables,
                "phases": trace.tables["phases"].select(trace.tables["phases"]["phase"] != Phase.FORWARD),
            },
        )
        for trace in found
    ]
    assert "no forward phase" in examine(without).next[0]


@pytest.mark.parametrize(("phase", "what"), [(Phase.CHECKPOINT, "checkpointing"), (Phase.EVAL, "evaluation")])
def test_what_rank_0_does_alone_every_20_steps_is_named(tmp_path, phase, what):
    verdict = verdict_on(tmp_path, extras=(Extra(rank=0, length_ns=100 * MS, phase=phase, every=20),))
    assert f"{what} on rank 0 alone, every 20 steps, costs" in verdict.headline
    assert verdict.findings[0].culprits[0].id == "0"
    assert "cron" not in " ".join(verdict.next)
    assert len(verdict.findings) == 1


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.EVAL])
def test_what_all_ranks_do_alike_is_no_finding(tmp_path, phase):
    extras = tuple(Extra(rank=rank, length_ns=100 * MS, phase=phase, every=20) for rank in range(4))
    assert verdict_on(tmp_path, extras=extras).findings == ()


def test_an_evaluation_and_a_checkpoint_are_two_findings(tmp_path):
    extras = tuple(
        Extra(rank=0, length_ns=ns * MS, phase=phase, every=20)
        for ns, phase in ((100, Phase.EVAL), (60, Phase.CHECKPOINT))
    )
    verdict = verdict_on(tmp_path, extras=extras)
    assert [finding.variety for finding in verdict.findings] == ["evaluation", "checkpoint"]
    assert verdict.findings[0].loss_share > verdict.findings[1].loss_share


def test_what_recurs_in_steps_is_the_script_and_not_cron(tmp_path):
    verdict = verdict_on(tmp_path, num_steps=120, extras=(Extra(rank=0, length_ns=100 * MS, every=10),))
    assert "recurs every 10 steps" in verdict.headline and "rank 0" in verdict.headline
    assert "what the script does every 10 steps, which no phase accounts for" in verdict.next[0]
    assert "cron" not in verdict.next[0]


def test_a_rollout_that_recurs_is_named_as_work_without_gradients(tmp_path):
    rollout = Extra(rank=1, length_ns=100 * MS, phase=Phase.OTHER, every=8)
    verdict = verdict_on(tmp_path, num_steps=120, extras=(rollout,), phase_source=OTHER_WITHOUT_GRADIENTS)
    assert "work of modules without gradients that recurs every 8 steps" in verdict.headline
    assert "rank 1" in verdict.headline
    assert "what the script does every 8 steps without gradients: a rollout" in verdict.next[0]


def test_data_that_come_late_every_8th_step_are_named_as_data(tmp_path):
    verdict = verdict_on(tmp_path, extras=(Extra(rank=1, length_ns=80 * MS, phase=Phase.DATA, every=8),))
    assert "data loading that recurs every 8 steps" in verdict.headline
    assert "loader" in verdict.next[0]


def test_input_bound_says_that_all_ranks_wait(tmp_path):
    extras = tuple(slow_in(Phase.DATA, rank=rank, length_ns=20 * MS) for rank in range(4))
    verdict = verdict_on(tmp_path, extras=extras)
    assert verdict.headline.startswith("input-bound: waiting for data costs")
    assert verdict.headline.endswith(" of the step time, on all ranks")


def test_input_bound_says_which_ranks_wait(tmp_path):
    extras = tuple(slow_in(Phase.DATA, rank=rank, length_ns=20 * MS) for rank in (0, 2, 3, 4, 6))
    verdict = verdict_on(tmp_path, num_ranks=8, extras=extras)
    assert " of the step time, on ranks 0, 2-4, 6" in " ".join([verdict.headline, *verdict.also])
    (found,) = (finding for finding in verdict.findings if finding.mode == "input-bound")
    assert [culprit.id for culprit in found.culprits] == ["data", "0", "2", "3", "4", "6"]
