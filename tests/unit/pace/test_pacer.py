"""A whole paced job in virtual time: what is found, tried, agreed on and given up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import paced_ranks
import pytest
from paced_ranks import STEP_NS, PacedRank, run_job

from hpcpace.pace.choice import CollectionSchedule, RankProfile
from hpcpace.pace.pacer import Pacer, PacingRecord
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import TrialOutcome
from hpcpace.trace.schema import PaceArm, PacePolicy, StepFlag

SETTINGS = PaceSettings(policy="slack", aa_pairs=3, max_pairs=8)


def _noise(rank: int, step: int) -> float:
    return float(np.random.default_rng((rank, step)).normal(0, 0.002))


def _slow_rank(rank: int, step: int, delays_ns: list[int]) -> float:
    return STEP_NS * (1 + 0.3 * (rank == 2) + _noise(rank, step))


def _polled_slow_rank(rank: int, step: int, delays_ns: list[int]) -> float:
    """The slow rank has the core to itself while the others sleep: from the step after their first delay on."""
    stolen = 0.1 * (rank == 2 and sum(delays_ns) == 0)
    return _slow_rank(rank, step, delays_ns) + stolen * STEP_NS


def test_waiting_alone_has_nothing_to_gain() -> None:
    ranks = run_job(SETTINGS, _slow_rank, num_steps=600)
    for rank in ranks:
        assert rank.record.trial is not None
        assert rank.record.trial.outcome == TrialOutcome.NO_EFFECT
        assert not rank.record.is_on and not rank.warnings
        assert rank.record.sentence().startswith("pacing off: waiting only, nothing to gain (")
        assert "could have seen" in rank.record.sentence()
    assert [point.name for point in ranks[0].record.points] == ["all_reduce 0"]


def test_the_critical_rank_is_never_delayed_and_the_others_within_their_bound() -> None:
    ranks = run_job(SETTINGS, _slow_rank, num_steps=600)
    assert not ranks[2].delays
    for rank in (0, 1, 3):
        lengths = [end - begin for begin, end in ranks[rank].delays]
        assert lengths and max(lengths) <= 1.01 * 0.05 * 1.31 * STEP_NS


def test_a_gain_is_kept_on_all_ranks() -> None:
    ranks = run_job(SETTINGS, _polled_slow_rank, num_steps=600)
    outcomes = {rank.record.trial.outcome for rank in ranks if rank.record.trial is not None}
    assert outcomes == {TrialOutcome.GAIN}
    assert all(rank.record.is_on for rank in ranks)
    assert ranks[0].record.sentence().startswith("pacing on: slack is faster (+7.")
    assert {row[2] for row in ranks[0].rows[-50:]} == {PaceArm.ON}


def test_every_measured_step_is_a_row() -> None:
    ranks = run_job(SETTINGS, _polled_slow_rank, num_steps=600)
    for number, rank in enumerate(ranks):
        steps = [row[0] for row in rank.rows]
        assert steps == list(range(22, 600))
        assert {row[1] for row in rank.rows} == {PacePolicy.SLACK}
        known = [row for row in rank.rows if row[5] >= 0]
        assert len(known) >= 570
        assert {row[2] for row in known} == set(PaceArm)
        assert all(row[4] == 0 for row in known if row[2] != PaceArm.ON)
        slack_ns = np.median([row[5] for row in known])
        assert slack_ns == 0 if number == 2 else slack_ns > 0.2 * STEP_NS


def test_observing_delays_nobody() -> None:
    ranks = run_job(PaceSettings(policy="observe"), _slow_rank, num_steps=100)
    assert all(not rank.delays and len(rank.rows) == 78 for rank in ranks)
    assert {row[2] for row in ranks[0].rows} == {PaceArm.OFF}
    assert ranks[0].record.sentence() == "pacing off: observed only"


def test_without_a_trial_the_policy_is_on_after_three_windows() -> None:
    ranks = run_job(PaceSettings(policy="published-spread", trial=False), _slow_rank, num_steps=100)
    assert {row[2] for row in ranks[0].rows if row[0] < 52} == {PaceArm.OFF}
    assert {row[2] for row in ranks[0].rows if row[0] >= 52} == {PaceArm.ON}
    assert ranks[0].delays
    assert ranks[0].record.sentence() == "pacing on: published-spread without a trial"


def test_a_harmful_policy_is_stopped_at_once() -> None:
    """Ranks that take turns at being late, held back by a rule that does not look at what that costs."""

    def rotating(rank: int, step: int, delays_ns: list[int]) -> float:
        return STEP_NS * (1 + 0.4 * (step % 4 == rank) + _noise(rank, step))

    settings = PaceSettings(policy="published-spread", aa_pairs=3, max_delay_share=0.2)
    ranks = run_job(settings, rotating, num_steps=400)
    for rank in ranks:
        assert rank.record.trial is not None
        assert rank.record.trial.outcome == TrialOutcome.HARM_AT_ONCE
        assert rank.record.trial.num_blocks_on == 1
    assert "stopped at once: steps of one block took 1" in ranks[0].record.sentence()


def test_each_group_is_paced_by_itself_and_a_rank_of_none_is_not() -> None:
    """Rank 0 is the slow one of its group; in the other group rank 3 is, by less, though all of it is faster."""

    def work(rank: int, step: int, delays_ns: list[int]) -> float:
        return STEP_NS * ((1.3, 1.0, 0.8, 0.95, 0.5)[rank] + _noise(rank, step))

    settings = PaceSettings(policy="slack", trial=False)
    ranks = run_job(settings, work, num_ranks=5, num_steps=200, groups=[(0, 1), (2, 3)])
    assert [point.ranks for point in ranks[4].record.points] == [(0, 1), (2, 3)]
    assert [len(rank.delays) > 0 for rank in ranks] == [False, True, True, False, False]
    slacks_ns = [np.median([row[5] for row in rank.rows if row[5] >= 0]) for rank in ranks[:4]]
    assert slacks_ns == [0, pytest.approx(30e6, rel=0.05), pytest.approx(15e6, rel=0.05), 0]
    assert {row[5] for row in ranks[4].rows} <= {-1}


def test_nothing_is_exchanged_once_the_trial_has_ended() -> None:
    ranks = run_job(SETTINGS, _slow_rank, num_steps=900)
    ends = {rank.rows[-1][0] for rank in ranks}
    assert len(ends) == 1 and ends.pop() < 600


def test_a_job_that_ends_early_is_undecided() -> None:
    record = run_job(SETTINGS, _slow_rank, num_steps=230)[0].record
    assert record.sentence() == "pacing off: undecided, the job ended after 2 of 6 or more pairs of blocks"
    assert record.to_json()["trial"]["outcome"] == "running"


def test_a_job_without_a_pacing_point_is_not_paced() -> None:
    ranks = run_job(SETTINGS, _slow_rank, num_steps=50, meets=False)
    assert {rank.record.sentence() for rank in ranks} == {
        "pacing off: no operation blocks a group of ranks exactly once in every step"
    }
    assert not ranks[0].rows


def test_gpus_are_observed_only() -> None:
    record = run_job(SETTINGS, _slow_rank, num_steps=50, on_device=True)[0].record
    assert "collectives run on GPUs" in record.sentence()
    assert record.facts["waits_on_device"]


def test_one_rank_waits_for_nobody() -> None:
    pacer = Pacer(
        SETTINGS,
        rank=0,
        exchange=None,
        profile=RankProfile(host_key="host", cores=frozenset()),
        first_step=1,
        trace=PacedRank(record=PacingRecord(policy="")),
        warn=lambda message: None,
    )
    for step in range(50):
        assert pacer.begin_step() == StepFlag.NONE
        pacer.leave(pacer.arrive("all_reduce"), (0,))
        pacer.end_step(step, 1000, 0)
    assert pacer.close(in_order=True).sentence() == "pacing off: a single rank has nobody to wait for"


def test_auto_tries_slack_where_ranks_poll_on_shared_cores() -> None:
    settings = PaceSettings(policy="auto", aa_pairs=3, max_pairs=8)
    ranks = run_job(settings, _polled_slow_rank, num_steps=600, thread_share=1.0)
    longest_ns = max(end - begin for rank in ranks for begin, end in rank.delays)
    assert 2 * settings.max_delay_share * STEP_NS < longest_ns < settings.polling_delay_share * 2 * STEP_NS
    assert {rank.record.tried for rank in ranks} == {"slack"}
    assert ranks[0].record.mechanisms == ["polling on shared cores"]
    assert ranks[0].record.is_on


def test_auto_leaves_alone_what_only_waits() -> None:
    gc.disable()
    try:
        ranks = run_job(PaceSettings(policy="auto", aa_pairs=3), _slow_rank, num_steps=400)
    finally:
        gc.enable()
    assert all(not rank.delays for rank in ranks)
    assert ranks[0].record.sentence() == (
        "pacing off: waiting only, nothing to gain (no full garbage collection in 80 steps)"
    )


def test_coschedule_collects_on_the_same_steps_of_all_ranks() -> None:
    """Full collections are put in: of 20 ms, one in 40 steps of each rank, each on steps of its own."""
    collected: dict[int, list[int]] = {rank: [] for rank in range(4)}
    schedules: dict[int, Any] = {}
    pending_ns = dict.fromkeys(range(4), 0)

    def customise(pacer: Pacer, rank: int) -> None:
        pacer._watch.start = lambda: None
        schedules[rank] = pacer

        def collect() -> None:
            pending_ns[rank] = 20_000_000
            if pacer._schedule.is_on:
                collected[rank].append(len(collected[rank]))
            else:  # on its own step, with which it takes up where it was
                pacer._watch._num_full += 1
                pacer._watch._time_ns += pending_ns[rank]

        pacer._schedule = _Schedule(collect)

    def work(rank: int, step: int, delays_ns: list[int]) -> float:
        pacer = schedules[rank]
        pause_ns, pending_ns[rank] = pending_ns[rank], 0
        holds_back = pacer._schedule.is_on or pacer._schedule._steps_until > 0
        if not holds_back and np.random.default_rng((step, rank)).random() < 1 / 40:
            pause_ns = 20_000_000
            pacer._watch._num_full += 1
            pacer._watch._time_ns += pause_ns
        return STEP_NS * (1 + _noise(rank, step)) + pause_ns

    settings = PaceSettings(policy="coschedule", max_pairs=20)
    ranks = run_job(settings, work, num_steps=3000, customise=customise)
    for rank in ranks:
        assert rank.record.trial is not None
        assert rank.record.trial.outcome == TrialOutcome.GAIN
        # Unscheduled 4 in 40 steps are a fifth longer, scheduled one in the steps of the rank that collects most.
        assert rank.record.trial.effect is not None and 0.004 < rank.record.trial.effect.mean < 0.02
    assert len({len(steps) for steps in collected.values()}) == 1
    assert all(not rank.delays for rank in ranks)


def test_coschedule_without_collections_says_so_also_without_a_trial() -> None:
    gc.disable()
    try:
        ranks = run_job(PaceSettings(policy="coschedule", trial=False), _slow_rank, num_steps=80)
    finally:
        gc.enable()
    assert {row[2] for row in ranks[0].rows} == {PaceArm.OFF}
    assert ranks[0].record.sentence() == "pacing off: no full garbage collection in 40 steps"


class _Schedule(CollectionSchedule):
    """Leaves Python's own thresholds alone, which are those of the process that runs the test."""

    def __init__(self, collect: Callable[[], None]) -> None:
        super().__init__(collect=collect)

    def _hold_back(self) -> None:
        pass

    def _give_back(self) -> None:
        pass


def test_steps_with_checkpoints_do_not_count() -> None:
    ranks = run_job(
        SETTINGS, _slow_rank, num_steps=200, flags=lambda step: StepFlag.CHECKPOINT if step % 10 == 5 else 0
    )
    assert not ranks[0].warnings
    assert ranks[0].record.trial is not None and ranks[0].record.trial.aa_effect is not None


def test_another_size_of_the_message_begins_anew_on_all_ranks() -> None:
    resets: list[int] = []

    def customise(pacer: Pacer, rank: int) -> None:
        activate = pacer._activate

        def spied(*args: Any) -> None:
            activate(*args)
            assert pacer._active is not None
            pacer._active.policy.reset = lambda: resets.append(rank)

        pacer._activate = spied

    run_job(SETTINGS, _slow_rank, num_steps=100, customise=customise, size_bytes=lambda rank, step: 1 + (step > 45))
    assert sorted(set(resets)) == [0, 1, 2, 3]


def _breaks(name: str) -> Callable[[Pacer, int], None]:
    def customise(pacer: Pacer, rank: int) -> None:
        def fail(*_: Any) -> None:
            raise OSError("broken")

        if rank == 1:
            setattr(pacer._precise_sleep, name, fail)

    return customise


def test_a_rank_that_cannot_sleep_ends_pacing_on_all() -> None:
    ranks = run_job(SETTINGS, _slow_rank, num_steps=600, customise=_breaks("delay"))
    assert ranks[1].warnings == ["pacing ends: broken; this rank is not delayed any more"]
    ends = {rank.rows[-1][0] for rank in ranks}
    assert len(ends) == 1 and ends.pop() < 300


def test_a_rank_that_cannot_read_its_clock_ends_pacing_on_all() -> None:
    def customise(pacer: Pacer, rank: int) -> None:
        def fail() -> int:
            raise OSError("no clock")

        if rank == 1:
            pacer._clocks = replace(pacer._clocks, thread=fail)

    ranks = run_job(SETTINGS, _slow_rank, num_steps=60, customise=customise)
    assert ranks[1].warnings[0] == "pacing ends: no clock; this rank is not delayed any more"
    assert {rank.record.sentence() for rank in ranks} == {
        "pacing off: no operation blocks a group of ranks exactly once in every step"
    }


def test_a_broken_exchange_costs_each_rank_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_ranks, "TIMEOUT_S", 0.2)
    ranks = run_job(SETTINGS, _slow_rank, num_steps=100, fails_at={3: 4})
    assert ranks[3].warnings == ["pacing ends: the network is gone; the job runs on unpaced"]
    assert all(len(rank.warnings) == 1 and "not every rank came" in rank.warnings[0] for rank in ranks[:3])
    assert all(rank.record.reason.startswith("given up: ") for rank in ranks)


class Silent:
    """An exchange in which no other rank says anything."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def allgather(self, value: Any) -> Silent:
        return self

    minimum = allgather

    def result(self, timeout_s: float) -> Any:
        self.waits_s.append(timeout_s)
        raise TimeoutError("nobody has come")

    def close(self) -> None:
        raise AssertionError("closing needs all ranks")


@pytest.mark.parametrize(("step_ns", "wait_s"), [(1_000_000, 0.01), (80_000_000, 0.08)])
def test_a_rank_waits_for_silent_ones_once_and_no_longer_than_a_step(step_ns: int, wait_s: float) -> None:
    exchange, warnings = Silent(), list[str]()
    pacer = Pacer(
        PaceSettings(policy="slack", timeout_s=3600.0),
        rank=0,
        exchange=exchange,
        profile=RankProfile(host_key="host", cores=frozenset()),
        first_step=1,
        trace=PacedRank(record=PacingRecord(policy="")),
        warn=warnings.append,
    )
    for step in range(50):
        pacer.end_step(step, step_ns, 0)
    assert exchange.waits_s == [wait_s] and len(warnings) == 1
    assert pacer.close(in_order=True).sentence() == "pacing off: given up: nobody has come"
