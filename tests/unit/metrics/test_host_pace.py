from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.host_waits import NO_PHASE, idle_ns, stretches_between_marks, usual_lengths
from hpcpace.metrics.issue_leads import IssuedPieces
from hpcpace.trace.schema import Phase

MS = 1_000_000
NONE = np.zeros(0, np.int64)
UNKNOWN = np.full((2, NO_PHASE + 1), np.nan)


def stretches(*phases, step_end=(40, 40), collections=()):
    """Return the stretches of one step from 0; of each phase: what it is, begin and end on host and device, in ms."""
    codes, *times = zip(*phases, strict=True)
    times = [(np.array(of) * MS).astype(np.int64) for of in times]
    begin, end = (np.array(of, np.int64) * MS for of in zip(*collections, strict=True)) if collections else (NONE, NONE)
    step = [np.array([value]) * MS for value in (0, step_end[0], 0, step_end[1])]
    return stretches_between_marks((np.array([7]), *step), (np.array(codes), *times), (begin, end))


def lengths_by_phase(found):
    return {int(phase): int(length) / MS for phase, length in zip(found.phase, found.length_ns, strict=True)}


def test_stretches_are_those_of_the_innermost_phase_between_marks_on_the_device():
    found = stretches(
        (Phase.FORWARD, 0, 3, 0, 10),
        (Phase.BACKWARD, 3, 8, 10, 32),
        (Phase.GRAD_SYNC, 7, 8, 30, 32),
        step_end=(9, 33),
    )
    assert lengths_by_phase(found) == {Phase.FORWARD: 10, Phase.BACKWARD: 20, Phase.GRAD_SYNC: 2, NO_PHASE: 1}
    assert (found.step == 7).all()


def test_a_device_is_dry_where_it_follows_its_host_within_50_us_or_1_percent():
    found = stretches((Phase.FORWARD, 0, 10, 0, 10.04), (Phase.BACKWARD, 10, 15, 10.04, 30), step_end=(40, 40.19))
    assert dict(zip(found.phase.tolist(), found.is_dry_after.tolist(), strict=True)) == {
        Phase.FORWARD: True,
        Phase.BACKWARD: False,
        NO_PHASE: False,
    }
    slow = stretches((Phase.FORWARD, 0, 39, 0, 39.3), step_end=(40, 45))
    assert slow.is_dry_after.tolist()[0]


def test_marks_that_the_host_makes_at_one_time_around_a_wait_of_the_stream_do_not_hide_that_it_was_dry():
    found = stretches((Phase.BACKWARD, 0, 10, 0, 15), (Phase.GRAD_SYNC, 10, 10, 10.01, 15), step_end=(11, 20))
    assert found.phase.tolist() == [Phase.BACKWARD, NO_PHASE]
    assert found.is_dry_after.tolist() == [True, False]
    assert found.length_ns.tolist() == [10.01 * MS, 5 * MS]


def of_steps(lengths_ms, *, is_dry_before, is_dry_after, collected_ms=0.0, phase=Phase.FORWARD):
    length = (np.asarray(lengths_ms) * MS).astype(np.int64)
    whole = np.ones(len(length))
    base = stretches((phase, 0, 1, 0, 1))
    begin = np.arange(len(length)) * 100 * MS
    return type(base)(
        step=np.arange(len(length)),
        phase=np.full(len(length), int(phase)),
        piece=np.zeros(len(length), np.int64),
        begin_ns=begin,
        end_ns=begin + length,
        is_dry_before=whole * is_dry_before > 0,
        is_dry_after=whole * is_dry_after > 0,
        collected_ns=(whole * collected_ms * MS).astype(np.int64),
        host_ns=length,
        lead_before_ns=np.zeros(len(length), np.int64),
        lead_after_ns=np.zeros(len(length), np.int64),
    )


def test_a_stretch_that_its_host_paced_is_idle_for_what_exceeds_the_usual_length_on_other_ranks():
    own = of_steps([10.0, 10.1, 9.9, 10.0, 10.0], is_dry_before=False, is_dry_after=False)
    paced = of_steps([16.0] * 5, is_dry_before=True, is_dry_after=True)
    waited, collected = idle_ns(paced, usual_lengths([own, paced]))
    assert waited.tolist() == pytest.approx([6 * MS] * 5)
    assert not collected.any()
    assert not idle_ns(own, usual_lengths([own, paced]))[0].any()


def test_without_any_usual_length_all_of_a_paced_stretch_may_be_idle():
    paced = of_steps([16.0] * 5, is_dry_before=True, is_dry_after=True)
    assert np.isnan(usual_lengths([paced])[0]).all()
    assert idle_ns(paced, UNKNOWN)[0].tolist() == [16 * MS] * 5
    assert idle_ns(paced, usual_lengths([paced]))[0].tolist() == [16 * MS] * 5


def test_a_stretch_that_only_ends_dry_may_end_with_a_synchronisation_and_is_not_idle():
    synchronised = of_steps([16.0] * 5, is_dry_before=False, is_dry_after=True)
    assert not idle_ns(synchronised, usual_lengths([synchronised]))[0].any()


def test_where_hosts_pace_some_stretches_others_that_end_dry_may_be_idle_from_when_the_device_had_done_all_before():
    paced = of_steps([16.0] * 5, is_dry_before=True, is_dry_after=True)
    ahead = replace(
        of_steps([16.0] * 5, is_dry_before=False, is_dry_after=True),
        lead_before_ns=np.full(5, 6 * MS),
        host_ns=np.full(5, 16 * MS),
    )
    assert idle_ns(ahead, usual_lengths([paced, ahead]))[0].tolist() == [10 * MS] * 5


def test_a_stall_in_the_midst_of_a_stretch_shows_against_other_steps():
    own = of_steps([10.0] * 19, is_dry_before=False, is_dry_after=False)
    stalled = of_steps([25.0], is_dry_before=False, is_dry_after=True)
    assert idle_ns(stalled, usual_lengths([own, stalled]))[0].tolist() == [15 * MS]


def test_idle_time_while_the_host_collects_garbage_is_that_of_the_collection():
    own = of_steps([10.0] * 19, is_dry_before=False, is_dry_after=False)
    stalled = of_steps([25.0], is_dry_before=False, is_dry_after=False, collected_ms=12.0)
    waited, collected = idle_ns(stalled, usual_lengths([own, stalled]))
    assert (waited.tolist(), collected.tolist()) == ([0], [12 * MS])


@each_case("phase", [Phase.DATA, Phase.GRAD_SYNC, Phase.CHECKPOINT, Phase.EVAL])
def test_other_phases_are_never_idle_for_the_host(phase):
    found = of_steps([16.0] * 5, is_dry_before=True, is_dry_after=True, phase=phase)
    assert not idle_ns(found, UNKNOWN)[0].any()


def test_time_outside_of_phases_is_not_idle_on_ranks_that_record_no_forward_and_backward():
    gap = of_steps([16.0] * 5, is_dry_before=True, is_dry_after=True, phase=NO_PHASE)
    assert not idle_ns(gap, UNKNOWN)[0].any()
    phase = np.array([Phase.FORWARD, Phase.BACKWARD, NO_PHASE, NO_PHASE, NO_PHASE])
    assert (idle_ns(replace(gap, phase=phase), UNKNOWN)[0][2:] == 16 * MS).all()


@each_case(
    "slow, follows",
    [(40, True), (20, True), (0, False)],
    ids=["slow in all steps", "slow in half of them", "ahead in all"],
)
def test_a_device_follows_a_host_that_is_slow_in_some_steps_and_ahead_in_others(slow, follows):
    """Its device works for 8 ms, in kernels of 0.5 ms, and was dry before."""
    random, is_slow = np.random.default_rng(1), np.arange(40) < slow
    host = np.where(is_slow, 12.0, 4.0) * random.normal(1.0, 0.01, 40)
    own = np.where(is_slow, host + 0.5, 8.0)
    columns = own, np.zeros(40), np.minimum(host, own), -host, own - host
    own_ns, held_ns, idle_ns, behind_ns, lead_ns = (np.round(of * 1e6)[:, None] for of in columns)
    pieces = IssuedPieces(own_ns=own_ns, held_ns=held_ns, idle_ns=idle_ns, behind_ns=behind_ns, lead_ns=lead_ns)
    assert pieces.is_following() is follows
