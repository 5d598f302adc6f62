from __future__ import annotations

import json

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
from hpcpace.core.errors import CannotTell
from hpcpace.core.rundir import write_json
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase

STEP_NS = DATA_NS + FORWARD_NS + BACKWARD_NS + TRANSFER_NS + OPTIMIZER_NS
CLOSE = {"rel": 1e-4}


def summary_of(tmp_path, selection=None, **options):
    run = SyntheticRun(**options).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    return analyze_traces(run, attempt, found, selection or Selection()).summary


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


def test_checkpoints_of_all_ranks_are_no_fault_and_what_they_take_is_said(tmp_path):
    extras = tuple(Extra(rank=rank, length_ns=600 * MS, phase=Phase.CHECKPOINT, every=10) for rank in range(4))
    summary = summary_of(tmp_path, num_steps=80, noise=0.02, extras=extras)
    gains = {gain.name: gain.gain_share for gain in summary.causes.gains}
    share = 60 / (60 + STEP_NS / MS)
    assert gains["phase checkpoint"] == pytest.approx(share, abs=0.04)
    assert summary.verdict.mode == "healthy"
    assert summary.verdict.headline.endswith("; no fault, but not nothing: checkpoints take 59.7 % of the step")


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


def test_a_wrong_clock_shows_as_exits_before_the_last_enter_and_is_named(tmp_path):
    hosts = ("n0", "n1", "n2", "n3")
    clocks = summary_of(tmp_path, hosts=hosts, clock_error_ns={2: -5 * MS}).clocks
    assert clocks.num_negative == 3 * 40
    assert {(pair.exit_node, pair.exit_host, pair.enter_host, pair.num_unexplained) for pair in clocks.pairs} == {
        (node, f"n{node}", "n2", 40) for node in (0, 1, 3)
    }
    assert clocks.pairs[0].max_ns == pytest.approx(3 * MS, rel=1e-3)
    (suspect,) = clocks.suspects
    assert (clocks.num_wrong, clocks.num_suspects, suspect.host, suspect.behind_ns) == (1, 1, "n2", 0)
    assert suspect.against == ("n0", "n1", "n3")
    assert suspect.ahead_ns == pytest.approx(3 * MS, rel=5e-3)


@each_case(
    ("halfwidth_ns", "error_ns", "num_wrong"),
    [
        (1 * MS, 5 * MS, 1),
        (1 * MS, -5 * MS, 1),
        (4 * MS, 5 * MS, 0),
        (4 * MS, -5 * MS, 0),
        (0, TRANSFER_NS + 300, 0),
        (0, TRANSFER_NS + 3000, 1),
    ],
)
def test_what_half_widths_and_rounding_explain_accuses_nobody(tmp_path, halfwidth_ns, error_ns, num_wrong):
    hosts, errors_ns = ("n0", "n1", "n2", "n3"), {2: error_ns}
    clocks = summary_of(tmp_path, hosts=hosts, clock_error_ns=errors_ns, halfwidth_ns=halfwidth_ns).clocks
    assert clocks.num_negative > 0
    assert clocks.num_wrong == num_wrong
    assert (sum(pair.num_unexplained for pair in clocks.pairs) > 0) == bool(num_wrong)


@each_case(
    ("hosts", "jumps", "named"),
    [
        (4, {2: 50 * MS}, [(("n2",), 50 * MS)]),
        (4, {2: -50 * MS}, [(("n2",), -50 * MS)]),
        (4, {0: 50 * MS}, [(("n0",), 50 * MS)]),
        (4, {1: 50 * MS, 2: -20 * MS}, [(("n1",), 50 * MS), (("n2",), -20 * MS)]),
        (2, {2: 50 * MS, 3: 50 * MS}, [(("n1", "n0"), 50 * MS)]),
        (2, {0: 50 * MS, 1: 50 * MS}, [(("n1", "n0"), -50 * MS)]),
        (1, {}, []),
        (4, {}, []),
    ],
)
def test_a_clock_that_jumps_is_named_with_the_step_and_the_rest_is_judged(tmp_path, hosts, jumps, named):
    names = tuple(f"n{number}" for number in range(hosts))
    summary = summary_of(
        tmp_path, hosts=names, slow={3: 1.5}, clock_jumps={rank: (20, size_ns) for rank, size_ns in jumps.items()}
    )
    assert [(jump.hosts, jump.size_ns, jump.step) for jump in summary.clocks.jumps] == [(*one, 20) for one in named]
    assert summary.verdict.mode == "persistent straggler" and "rank 3" in summary.verdict.headline


def test_the_reference_has_jumped_where_all_others_have_between_the_same_comparisons(tmp_path):
    """In which step a clock has jumped shows only as far as ranks end their steps together."""
    jumps = {1: (20, 50 * MS), 2: (20, 50 * MS), 3: (21, 50 * MS)}
    (jump,) = summary_of(tmp_path, hosts=("n0", "n1", "n2", "n3"), clock_jumps=jumps).clocks.jumps
    assert (jump.hosts, jump.size_ns, jump.step) == (("n0",), -50 * MS, 20)


def test_a_clean_run_accuses_no_clock_and_lacks_no_record(tmp_path):
    summary = summary_of(tmp_path, num_ranks=8, hosts=("n0", "n1", "n2", "n3"), noise=0.1)
    assert (summary.clocks.num_wrong, summary.clocks.suspects, summary.clocks.pairs) == (0, (), ())
    assert summary.cut_off.ranks == ()
    assert summary.is_whole


def test_a_run_with_a_wrong_clock_is_not_whole(tmp_path):
    assert not summary_of(tmp_path, hosts=("n0", "n1"), clock_error_ns={2: 5 * MS, 3: 5 * MS}).is_whole


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


def test_waits_for_a_rank_without_a_trace_are_unknown_and_not_0(tmp_path):
    summary = summary_of(tmp_path, missing=(3,))
    content = json.loads(json.dumps(summary.to_json()))
    assert content["shares"]["exposed_wait"] is None
    assert content["shares"]["transfer"] == pytest.approx(TRANSFER_NS / content["ranks"][0]["step_ns"], **CLOSE)
    for row in (*content["ranks"], *content["roles"]):
        assert (row["parts_ns"]["wait"], row["parts_ns"]["sync_wait"], row["shares"]["wait"]) == (None, None, None)
        assert sum(filter(None, row["parts_ns"].values())) == pytest.approx(row["step_ns"])
    assert {(row["wait_ns"], row["transfer_ns"]) for row in content["ranks"]} == {(None, None)}
    assert [(kind["mean_wait_ns"], kind["mean_transfer_ns"]) for kind in content["kinds"]] == [(None, None)]


def test_a_hang_names_who_is_inside_and_who_never_came(tmp_path):
    cut_off = summary_of(tmp_path, hangs=True).cut_off
    assert cut_off.not_closed == (0, 1, 2, 3)
    assert [(operation.inside, operation.absent) for operation in cut_off.open] == [((1, 2, 3), (0,))]


def test_a_killed_rank_lost_what_the_others_completed_with_it(tmp_path):
    (cut,) = summary_of(tmp_path, hosts=("n0", "n1"), lost_steps={2: 9}).cut_off.ranks
    assert (cut.rank, cut.host, cut.last_step, cut.num_dropped) == (2, "n1", 30, 0)
    assert (cut.num_lost_operations, cut.num_lost_steps, cut.gap_ns) == (9, 8, 900 * MS)


def test_ranks_that_were_killed_together_lost_nothing_that_others_show(tmp_path):
    cut = summary_of(tmp_path, hangs=True).cut_off.ranks
    assert [(rank.rank, rank.num_lost_operations, rank.num_lost_steps) for rank in cut] == [
        (rank, 0, 0) for rank in range(4)
    ]


def test_the_host_of_a_rank_without_a_trace_is_known_from_run_json(tmp_path):
    run = SyntheticRun(missing=(3,), hosts=("n0", "n1")).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    write_json(attempt.run_json, {"ranks": [{"rank": 3, "host": "n1"}]})
    found = read_attempt(attempt)
    (cut,) = analyze_traces(run, attempt, found, Selection()).summary.cut_off.ranks
    assert (cut.rank, cut.host, cut.has_trace, cut.last_step) == (3, "n1", False, None)
    assert (cut.num_lost_operations, cut.num_lost_steps) == (40, 39)


@each_case("content", ["", "[]", '{"ranks": 3}', '{"ranks": [{"rank": "x"}]}', '{"ranks": [7]}'])
def test_a_foreign_run_json_only_leaves_a_host_unknown(tmp_path, content):
    run = SyntheticRun(missing=(3,)).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    attempt.run_json.write_text(content)
    found = read_attempt(attempt)
    (cut,) = analyze_traces(run, attempt, found, Selection()).summary.cut_off.ranks
    assert cut.host == ""


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
