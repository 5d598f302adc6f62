from __future__ import annotations

import pytest
from synthetic_run import BACKWARD_NS, DATA_NS, FORWARD_NS, MS, OPTIMIZER_NS, TRANSFER_NS, SyntheticRun

from hpcpace.errors import CannotTell
from hpcpace.report.analysis import Selection, summarize
from hpcpace.trace.reader import read_attempt

STEP_NS = DATA_NS + FORWARD_NS + BACKWARD_NS + TRANSFER_NS + OPTIMIZER_NS
CLOSE = {"rel": 1e-4}


def summary_of(tmp_path, selection=None, **options):
    run = SyntheticRun(**options).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    return summarize(run, attempt, found.traces, found.problems, selection or Selection())


def test_parts_of_a_clean_run_are_what_was_written(tmp_path):
    summary = summary_of(tmp_path)
    for row in summary.ranks:
        assert row.step_ns == pytest.approx(STEP_NS, **CLOSE)
        assert row.parts_ns["forward"] == pytest.approx(FORWARD_NS, **CLOSE)
        assert row.parts_ns["backward"] == pytest.approx(BACKWARD_NS, **CLOSE)
        assert row.parts_ns["transfer"] == pytest.approx(TRANSFER_NS, **CLOSE)
        assert row.parts_ns["optimizer"] == pytest.approx(OPTIMIZER_NS, **CLOSE)
        assert sum(row.parts_ns.values()) == pytest.approx(row.step_ns)
    assert not any(row.excess.is_marked for row in summary.ranks)


def test_throughput_is_samples_over_wall_time(tmp_path):
    summary = summary_of(tmp_path, samples_per_step=64)
    assert summary.throughput.samples_per_s == pytest.approx(64 / (STEP_NS / 1e9), **CLOSE)
    assert summary.throughput.samples == 38 * 64


def test_shares_add_up_to_one(tmp_path):
    shares = summary_of(tmp_path, slow={1: 1.5}).shares
    assert shares.busy + shares.exposed_wait + shares.transfer + shares.other == pytest.approx(1.0)


def test_the_others_wait_for_a_slow_rank_whatever_their_clocks_show(tmp_path):
    offsets_ns = {1: 3_600_000 * MS, 2: -4_000 * MS}
    summary = summary_of(tmp_path, slow={2: 1.3}, offsets_ns=offsets_ns, hosts=("n0", "n1", "n2", "n3"))
    waits_ns = [row.parts_ns["wait"] for row in summary.ranks]
    late_ns = 0.3 * (FORWARD_NS + BACKWARD_NS)
    assert waits_ns == [pytest.approx(late_ns, **CLOSE)] * 2 + [pytest.approx(0, abs=1000), waits_ns[0]]
    assert summary.clocks.num_negative == 0
    assert summary.throughput.p50_ns == pytest.approx(STEP_NS + late_ns, **CLOSE)


def test_a_slow_rank_in_a_mesh_shows_in_its_own_role_only(tmp_path):
    summary = summary_of(tmp_path, slow={2: 1.3}, pipeline=2, noise=0.02)
    assert [role.ranks for role in summary.roles] == [(0, 2), (1, 3)]
    assert [row.excess.is_marked for row in summary.ranks] == [False, False, True, False]
    busy_ns = FORWARD_NS + BACKWARD_NS
    assert summary.ranks[2].excess.share == pytest.approx(0.3 * busy_ns / (busy_ns + OPTIMIZER_NS), abs=0.02)


def test_a_wrong_clock_shows_as_exits_before_the_last_enter(tmp_path):
    run = SyntheticRun(hosts=("n0", "n1", "n2", "n3")).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    found.traces[2].tables["clock"]["offset_ns"][:] -= 5 * MS
    clocks = summarize(run, attempt, found.traces, found.problems, Selection()).clocks
    assert clocks.num_negative == 3 * 40
    assert {(pair.exit_node, pair.enter_node, pair.num_unexplained) for pair in clocks.pairs} == {
        (node, 2, 40) for node in (0, 1, 3)
    }
    assert clocks.pairs[0].max_ns == pytest.approx(3 * MS, rel=1e-3)


def test_ranks_without_a_common_clock_are_not_compared(tmp_path):
    summary = summary_of(tmp_path, has_clock=False, hosts=("n0", "n1"))
    assert summary.clocks.num_unknown == 2
    assert summary.kinds[0].num_unmatched == summary.kinds[0].num_rows


def test_ranks_of_one_host_have_one_clock_without_any_synchronisation(tmp_path):
    summary = summary_of(tmp_path, has_clock=False, slow={0: 1.5})
    assert summary.clocks.num_unknown == 0
    assert summary.ranks[1].parts_ns["wait"] == pytest.approx(0.5 * (FORWARD_NS + BACKWARD_NS), **CLOSE)


def test_a_missing_rank_is_named_and_what_it_took_part_in_stays_unmatched(tmp_path):
    summary = summary_of(tmp_path, missing=(3,))
    assert summary.world.missing == (3,)
    assert summary.kinds[0].ranks_unmatched == (0, 1, 2)
    assert summary.ranks[0].parts_ns["transfer"] == pytest.approx(TRANSFER_NS, **CLOSE)


def test_a_hang_names_who_is_inside_and_who_never_came(tmp_path):
    cut_off = summary_of(tmp_path, hangs=True).cut_off
    assert cut_off.not_closed == (0, 1, 2, 3)
    assert [(operation.inside, operation.absent) for operation in cut_off.open] == [((1, 2, 3), (0,))]


def test_a_world_of_one_has_no_communication_and_nothing_to_compare(tmp_path):
    summary = summary_of(tmp_path, num_ranks=1)
    assert summary.kinds == ()
    assert summary.ranks[0].excess is None
    assert summary.shares.exposed_wait == 0.0


def test_warmup_is_used_only_when_asked_for(tmp_path):
    assert summary_of(tmp_path, Selection(include_warmup=True)).steps.num_used == 40


def test_no_step_left_is_nothing_to_tell(tmp_path):
    with pytest.raises(CannotTell, match="none of the 40 common steps"):
        summary_of(tmp_path, Selection(first=1000))


def test_a_hang_in_the_first_step_is_told_though_there_is_no_step(tmp_path):
    with pytest.raises(CannotTell, match="never completed: ranks 1-3 inside"):
        summary_of(tmp_path, num_steps=0, hangs=True)
