"""Ranks that did not run for some time, and ranks that only look like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.score.generator import clocks_of, traces_of
from experiments.score.scenario import Scenario
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode
from hpcpace.metrics.stops import StopThresholds, rank_stops
from hpcpace.trace.schema import TABLES
from hpcpace.trace.tables import RankTrace, Table

S = 1_000_000_000
# Ranks 0 and 1 are on n1, 2 and 3 on n2.
SCENARIO = Scenario(seed=5, num_ranks=4, ranks_per_node=2, num_steps=150, level=0.005, clock_interval_s=2.0)
STEP, LAST = 60, 2
_TIMES = ("begin_ns", "end_ns", "enter_ns", "exit_ns", "time_ns")


def shifted(table: Table, stop_ns: int, length_ns: int) -> Table:
    """Return rows with everything after the stop later by its length; operations that it is in block for longer."""
    rows = {name: c + length_ns * (c > stop_ns) if name in _TIMES else c for name, c in table.items()}
    if "blocked_ns" in rows:
        is_in = (table["enter_ns"] <= stop_ns) & (table["exit_ns"] > stop_ns)
        rows["blocked_ns"] = rows["blocked_ns"] + length_ns * is_in
    return Table(rows)


def samples(host: Table, stop_ns: int, length_ns: int, *, is_stopped: bool, wakeups: float, cpu: float) -> Table:
    """Return host samples once a second; those of a stopped rank have a gap, and its counters may go on."""
    begin_ns, end_ns = int(host["time_ns"][0]), int(host["time_ns"][-1]) + length_ns
    time_ns = np.arange(begin_ns, end_ns, S)
    if is_stopped:
        late = (time_ns > stop_ns) & (time_ns < stop_ns + length_ns)
        time_ns = np.concatenate([time_ns[time_ns <= stop_ns], np.arange(stop_ns + length_ns, end_ns, S)])
        assert late.any()
    before_ns = np.where(time_ns > stop_ns, np.maximum(time_ns - length_ns, stop_ns), time_ns)
    rows = np.zeros(len(time_ns), TABLES["host"].dtype)
    rows["time_ns"] = time_ns
    for name in ("cpu_time_ns", "run_wait_ns"):
        rows[name] = np.interp(before_ns, host["time_ns"], host[name])
    rows["cpu_time_ns"] += (cpu * length_ns * (time_ns > stop_ns)).astype(np.int64)
    rows["sampler_wakeups"] = 3 * np.arange(len(time_ns)) + wakeups * length_ns / S * (time_ns > stop_ns)
    return Table.from_rows(rows)


def accounts(account: Table, time_ns: np.ndarray) -> Table:
    """Return flushes at these times."""
    rows = {name: np.resize(column, len(time_ns)) for name, column in account.items()}
    return Table({**rows, "time_ns": np.asarray(time_ns, np.int64)})


def stopped(ranks, length_s: float, *, wakeups=0.0, cpu=0.0, faults=0, old=False, **header) -> list[RankTrace]:
    """Return a run in which some ranks do not run for so long, just before the last rank enters an all_reduce.

    All others are in that operation, and their samples go on.
    """
    traces, clocks = traces_of(SCENARIO), clocks_of(SCENARIO)
    zeros_ns = [int(clocks.local_ns(np.zeros(1), np.array(trace.header.node))[0]) for trace in traces]
    operations = [trace.tables["collectives"] for trace in traces]
    enters_ns = [
        int(rows["enter_ns"][rows["step"] == STEP].min()) - zero_ns
        for rows, zero_ns in zip(operations, zeros_ns, strict=True)
    ]
    assert int(np.argmax(enters_ns)) == LAST
    found, length_ns = [], int(length_s * S)
    for row, trace in enumerate(traces):
        stop_ns, is_in = max(enters_ns) + zeros_ns[row] - 1000, row in ranks
        tables = {name: shifted(table, stop_ns, length_ns) for name, table in trace.tables.items()}
        host = samples(trace.tables["host"], stop_ns, length_ns, is_stopped=is_in, wakeups=wakeups, cpu=cpu * is_in)
        faulted = faults * is_in * (host["time_ns"] > stop_ns)
        host = Table({**host, "major_faults": faulted, "sampler_wakeups": host["sampler_wakeups"] * (not old)})
        tables["account"] = accounts(trace.tables["account"], host["time_ns"] - 300)
        made = replace(trace.header, **{"created_unix_ns": 1_700_000_000 * S, **header})
        found.append(replace(trace, header=made, tables={**tables, "host": host}))
    return found


def test_stops_of_ranks_hosts_and_jobs_are_told_apart_with_their_begin_and_length():
    problems, of_host, of_job = [], (2, 3), (0, 1, 2, 3)
    cases = [
        # Ranks, seconds, further facts; then the variety, culprits, and parts of headline, reason and advice.
        ((LAST,), 40, {}, "rank", ["2"], "rank 2 on n2 did not run for 40.0 s from ", "other ranks", "SIGSTOP"),
        ((LAST,), 2, {}, "rank", ["2"], "for 2.0", "processor time", "SIGSTOP"),
        ((LAST,), 1.1, {}, "rank", ["2"], "for 1.1", "processor time", "SIGSTOP"),
        ((LAST,), 40, {"created_unix_ns": 0}, "rank", ["2"], "for 40.0 s (step 60)", "other ranks", "SIGSTOP"),
        (of_host, 40, {}, "host", ["n2"], "all 2 ranks of n2 did not run for 40.0 s", "that gap", "paused or migrated"),
        (of_host, 40, {"faults": 9000}, "host", ["n2"], "all 2 ranks of n2", "swapped", "filled the memory of n2"),
        (of_job, 40, {}, "job", [], "all 4 ranks did not run for 40.0 s", "that gap", "scontrol suspend"),
        ((LAST,), 40, {"wakeups": 200}, "call", ["2"], "in one call that uses no core for 40.0 s", "lock", "py-spy"),
        ((LAST,), 40, {"old": True}, "rank", ["2"], "did not run", "looks alike", "SIGSTOP"),
    ]
    for ranks, length_s, facts, variety, culprits, *parts in cases:
        verdict = examine(stopped(ranks, length_s, **facts))
        named = [culprit.id for culprit in verdict.culprits]
        words = zip(parts, (verdict.headline, verdict.why[0], verdict.next[0]), strict=True)
        is_right = (verdict.mode, verdict.variety, named) == (Mode.STOPPED, variety, culprits)
        # Nothing else is found: the other steps are as they were.
        is_sole = len(verdict.findings) == 1
        if not is_right or not is_sole or not all(part in text for part, text in words):
            problems.append((ranks, length_s, facts, verdict))
    assert not problems, problems[0]


def test_what_it_costs_is_the_length_as_a_share_of_the_time_and_begins_where_the_last_row_was():
    (finding,) = examine(stopped((LAST,), 10.0)).findings
    total_s = 10 + 150 * 0.11
    assert abs(finding.loss_share - 10 / total_s) < 0.03
    assert abs(finding.numbers["length_ns"] - 10 * S) < 0.1 * S
    begin_s = finding.numbers["begin_unix_ns"] / S - 1_700_000_000
    assert abs(begin_s - 62 * 0.11) < 1.5


def test_a_rank_that_computes_while_its_samples_are_late_was_not_stopped():
    modes = {examine(stopped((LAST,), 40.0, cpu=cpu)).mode for cpu in (0.3, 1.0, 8.0)}
    assert Mode.STOPPED not in modes


def test_a_rank_whose_other_rows_go_on_was_not_stopped():
    traces = stopped((LAST,), 40.0)
    own = traces[LAST]
    times_ns = np.arange(own.tables["account"]["time_ns"][0], own.tables["account"]["time_ns"][-1], S)
    account = accounts(own.tables["account"], times_ns)
    traces[LAST] = replace(own, tables={**own.tables, "account": account})
    assert examine(traces).mode != Mode.STOPPED


def test_without_samples_a_long_step_of_one_rank_is_said_and_its_cause_is_not():
    traces = [
        replace(each, tables={**each.tables, "host": each.tables["host"].select(slice(0))})
        for each in stopped((LAST,), 40.0)
    ]
    verdict = examine(traces)
    assert verdict.mode == Mode.CANNOT_TELL
    assert "rank 2 on n2 took 40.1 s in step 60" in verdict.headline
    assert "trace.counters" in verdict.next[0]


def test_a_short_stop_of_a_long_run_is_no_finding_and_samples_of_ranks_that_end_are_none():
    assert examine(stopped((LAST,), 40.0)[:1]).mode != Mode.STOPPED
    traces = traces_of(SCENARIO)
    assert examine(traces).mode == Mode.HEALTHY


def test_on_a_busy_host_a_rank_is_stopped_only_if_its_threads_did_not_wait_for_cores_for_as_long():
    for late_s, num_stops in ((2, 0), (20, 1)):
        rows = np.zeros(40, TABLES["host"].dtype)
        rows["time_ns"] = np.arange(1, 41) * S + late_s * S * (np.arange(40) >= 20)
        # Eight threads of this rank wait in every interval, for 8 s together, also in the one whose end comes late.
        rows["run_wait_ns"] = np.arange(40) * 8 * S
        rows["cpu_time_ns"] = np.arange(40) * S // 5
        found = rank_stops(Table.from_rows(rows), [], StopThresholds())
        assert len(found.begin_ns) == num_stops
