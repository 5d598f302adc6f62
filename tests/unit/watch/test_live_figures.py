"""What a run does now, from the files that its ranks are writing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from live_run import UNIX_S, LiveRun, S, row

from hpcpace.core.rundir import write_json
from hpcpace.trace.schema import StepFlag
from hpcpace.watch.state import Doing, RankDoing
from hpcpace.watch.watcher import Watcher


def test_step_time_rate_and_eta(run: LiveRun) -> None:
    state = run.look()
    assert state.doing == Doing.RUNNING and (state.num_steps, state.planned_steps) == (30, 1000)
    assert state.step_ns == pytest.approx(0.1 * S) and state.rate == pytest.approx(10)
    assert state.sample_rate == pytest.approx(4 * 32 * 10) and state.samples_unit == "tokens"
    assert state.eta_s == pytest.approx(97)
    assert (state.jobid, state.name, state.world_size, state.num_live) == ("17", "demo", 4, 4)


def test_a_step_is_compared_with_the_past_of_the_run(run: LiveRun) -> None:
    run.look()
    run.steps(20, step_s=0.15)
    run.flush()
    state = run.look()
    assert state.change == pytest.approx(0.5) and state.past_ns == pytest.approx(0.1 * S)


def test_special_steps_are_no_part_of_the_past(run: LiveRun) -> None:
    run.steps(40, step_s=0.9, flags=StepFlag.CHECKPOINT)
    run.steps(10)
    run.flush()
    assert run.look().past_ns == pytest.approx(0.1 * S)


def test_of_steps_with_less_detail_only_times_count(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    run.begin()
    run.steps(40, flags=StepFlag.PLAIN | StepFlag.WARMUP)
    run.flush()
    state = run.look()
    assert state.past_ns == pytest.approx(0.1 * S) and state.wait_share is None
    assert [one.own_ns for one in state.ranks] == [None] * 4
    run.close()


def test_a_slow_rank_is_named_by_its_own_work_and_the_others_wait(run: LiveRun) -> None:
    run.look()
    run.steps(10, own_s={2: 0.09})
    run.flush()
    state = run.look()
    slow, other = state.ranks[2], state.ranks[0]
    assert slow.excess is not None and slow.excess > 0.1 and slow.reason.startswith("own work +")
    assert slow.wait_ns == 0 and other.reason.startswith("waits for others")
    assert state.wait_share is not None and 0.05 < state.wait_share < 0.3


def test_of_two_ranks_the_slow_one_is_held_against_the_other(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=2)
    run.begin()
    run.steps(30, own_s={0: 0.02, 1: 0.09})
    run.flush()
    fast, slow = run.look().ranks
    assert slow.excess == pytest.approx(3.5) and fast.excess == 0.0
    run.close()


def test_equal_ranks_have_no_reason(run: LiveRun) -> None:
    state = run.look()
    assert [one.reason for one in state.ranks] == [""] * 4
    assert state.wait_share == 0 and state.blocked_share == pytest.approx(0.4)


def test_stages_are_not_compared_with_each_other(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=2)
    run.begin()
    run.writers[1]._header = replace(run.header(1), pp=1)
    run.steps(30, own_s={0: 0.09, 1: 0.01})
    run.flush()
    assert [one.excess for one in run.look().ranks] == [None, None]
    run.close()


def test_tensor_slots_without_replicas_are_compared_with_each_other(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=3)
    run.begin()
    for rank, writer in run.writers.items():
        writer._header = replace(run.header(rank), pp=0, tp=rank)
    run.steps(30, own_s={1: 0.09})
    run.flush()
    slow = run.look().ranks[1]
    assert slow.excess == pytest.approx(0.5) and slow.reason.startswith("own work +")
    run.close()


def test_with_more_ranks_than_are_looked_at_in_detail_they_take_turns(run: LiveRun) -> None:
    run.look(num_detailed=1)
    for _ in range(8):
        run.steps(10)
        run.flush()
        state = run.look(num_detailed=1)
    ages = [one.detail_age_s for one in state.ranks]
    assert None not in ages and max(age for age in ages if age is not None) > 0.5
    assert state.detail_s == pytest.approx(max(age for age in ages if age is not None))


def test_ranks_left_by_a_look_come_first_in_the_next(run: LiveRun) -> None:
    state = run.look(most_s=-1.0)
    assert [one.doing for one in state.ranks] == [RankDoing.LIVE, *[RankDoing.UNSEEN] * 3]
    assert [one.doing for one in run.look(most_s=-1.0).ranks][:2] == [RankDoing.LIVE] * 2


def test_a_rank_that_stops_writing_is_silent(run: LiveRun) -> None:
    run.look()
    for _ in range(30):
        run.now_s += 1
        run.flush(0, 1, 3)
        state = run.look()
    assert state.silent == (2,) and state.ranks[2].silent_s == pytest.approx(30) and state.num_live == 3
    assert state.step_age_s == pytest.approx(30)


def test_of_a_first_look_files_are_compared_with_the_newest_one(run: LiveRun) -> None:
    run.now_s += 60
    run.flush(0, 1, 3)
    assert run.look().silent == (2,)


def test_a_run_whose_ranks_were_all_killed_is_silent(run: LiveRun) -> None:
    run.now_s += 60
    state = run.look()
    assert state.doing == Doing.SILENT and state.silent == (0, 1, 2, 3) and state.eta_s is None


def test_a_clock_that_is_behind_the_files_is_named_and_not_compared(run: LiveRun) -> None:
    run.now_s += 60
    state = run.look(unix_s=UNIX_S - 3600)
    assert state.doing == Doing.RUNNING and not state.silent
    assert any("ahead of this host's" in note for note in state.notes)


def test_a_clock_that_is_ahead_of_the_files_is_known_once_they_change(run: LiveRun) -> None:
    assert run.look(unix_s=UNIX_S + run.now_s + 3600).doing == Doing.SILENT
    run.steps(10)
    run.flush()
    state = run.look(unix_s=UNIX_S + run.now_s + 3600)
    assert state.doing == Doing.RUNNING and not state.silent
    assert any("3600 s behind this host's" in note for note in state.notes)


def test_one_look_looks_twice_where_ranks_seem_silent(run: LiveRun) -> None:
    def pause(seconds: float) -> None:
        run.steps(10)
        run.flush()

    watcher = Watcher(run.run.path, interval_s=1.0, hang_s=5.0, clock=lambda: run.now_s)
    state = watcher.look(pause=pause)  # by the clock of this host, the files are years old
    assert state.doing == Doing.RUNNING and not state.silent


def test_a_rank_without_a_file_is_missing(run: LiveRun) -> None:
    for suffix in (".h5", ".journal"):
        run.attempt.trace_file(3).with_suffix(suffix).unlink()
    state = run.look()
    assert state.missing == (3,) and state.num_live == 3 and state.doing == Doing.RUNNING


def test_dropped_rows_are_added_up(run: LiveRun) -> None:
    run.flush(1, dropped=5)
    run.flush(1, dropped=7)
    state = run.look()
    assert state.num_dropped == 12 and state.ranks[1].num_dropped == 12


def test_open_operations_are_shown_until_they_complete(run: LiveRun) -> None:
    run.open_call(1)
    run.flush()
    run.now_s += 5
    run.flush()
    assert run.look().ranks[1].open_calls[0].startswith("all_reduce 30 of group 0, for 5.00 s")
    run.writers[1].set_open(row("collectives")[:0])
    run.steps(1)
    run.flush()
    assert run.look().ranks[1].open_calls == ()


def test_network_use_of_each_host(run: LiveRun) -> None:
    for second in (1, 2):
        for rank in (0, 2):
            at_ns = run.local_ns(rank) + second * S
            sent = second * (10**6 if rank == 0 else 10**7)
            run.writers[rank].add("network", row("network", time_ns=at_ns, interface=0, tx_bytes=sent, rx_bytes=5))
            run.writers[rank].add("network", row("network", time_ns=at_ns, interface=1, tx_bytes=sent * 9))
    run.flush()
    hosts = {one.host: one for one in run.look().hosts}
    assert hosts["n1"].sent_bps == pytest.approx(8e6) and hosts["n2"].sent_bps == pytest.approx(8e7)
    assert hosts["n1"].interface == "eth0" and hosts["n1"].share is None


def test_pacing_shows_its_arm_and_then_its_result(run: LiveRun) -> None:
    run.writers[0].add("pacing", row("pacing", step=29, policy=3, arm=1, delay_ns=2_000_000))
    run.flush()
    assert "arm on at step 29, largest delay 2.00 ms" in run.look().pacing
    write_json(run.attempt.trial_json, {"sentence": "pacing off: nothing to gain"})
    for writer in run.writers.values():
        writer.close()
    run.writers = {}
    assert run.look().pacing == "pacing off: nothing to gain"


@pytest.mark.parametrize(
    ("outcome", "doing"), [("finished", Doing.FINISHED), ("stopped", Doing.STOPPED), ("", Doing.FAILED)]
)
def test_a_run_that_has_ended(run: LiveRun, outcome: str, doing: Doing) -> None:
    run.look()
    for writer in run.writers.values():
        writer.close()
    run.writers = {}
    if outcome:
        write_json(run.attempt.result_json, {"outcome": outcome})
    state = run.look()
    assert state.doing == doing and state.num_ended == 4 and state.num_steps == 30


def test_a_run_that_has_not_started_a_requeue_and_a_removal(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    assert run.look().doing == Doing.NOT_STARTED
    run.begin()
    assert run.look().doing == Doing.STARTING
    run.steps(30)
    run.flush()
    assert run.look().num_steps == 30
    run.begin()
    run.steps(5)
    run.flush()
    state = run.look()
    assert (state.attempt, state.num_attempts, state.num_steps) == (1, 2, 5)
    run.close()
    shutil.rmtree(run.run.path)
    assert run.look().doing == Doing.REMOVED


def test_a_run_that_is_moved_is_followed(run: LiveRun, tmp_path: Path) -> None:
    run.look()
    run.run.path.rename(tmp_path / "elsewhere")
    run.steps(5)
    for rank in run.writers:
        run.writers[rank].flush()
    assert run.look().num_steps == 35


def test_two_watches_see_the_same(run: LiveRun) -> None:
    other = LiveRun(run.run.path.parent)
    other.now_s = run.now_s
    assert run.look().to_json() == other.look().to_json()


def test_damaged_and_foreign_files_are_named_and_the_others_shown(run: LiveRun) -> None:
    run.attempt.trace_file(0).with_suffix(".journal").write_bytes(b"\x1b[2Jno journal")
    run.attempt.trace_file(1).with_suffix(".journal").unlink()
    run.attempt.trace_file(1).with_suffix(".journal").symlink_to("/etc/passwd")
    state = run.look()
    assert [one.doing for one in state.ranks] == [RankDoing.DAMAGED] * 2 + [RankDoing.LIVE] * 2
    assert "ranks 0-1 cannot be read" in state.notes
    assert "\x1b" not in json.dumps(state.to_json()) and "\\u001b" not in json.dumps(state.to_json())


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"config": 3}', '{"ranks": [{"rank": "x"}], "config": {"trace": []}}']
)
def test_a_run_json_that_cannot_be_used_costs_only_what_it_says(run: LiveRun, content: str) -> None:
    run.attempt.run_json.write_text(content)
    state = run.look()
    assert state.doing == Doing.RUNNING and state.planned_steps is None and state.num_steps == 30
