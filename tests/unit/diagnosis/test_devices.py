"""Runs of ranks with a device: figures from its times, and what is said where nobody knows these."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import each_case
from report_sample import print_report
from rich.console import Console

from hpcpace.core.text import format_duration, percent
from hpcpace.diagnosis.analyze import Analysis, analyze_traces, examine
from hpcpace.diagnosis.devices import is_on_device, on_devices
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.run_report import page
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import Table, join_tables
from tests.device_run import MS, STEP, DeviceRun

SLOW = {2: 1.3}
LAYOUTS = (
    {},
    {"syncs": False, "ahead": 5},
    {"num_buckets": 1},
    {"blocks": True},
    {"blocks": True, "syncs": False},
    {"on_host": (0, 1)},
    {"num_ranks": 16},
)


def analyzed(path: Path, **settings: object) -> Analysis:
    run = DeviceRun(**settings).write(path)
    attempt = run.last_attempt()
    return analyze_traces(run, attempt, read_attempt(attempt), Selection())


def summarized(path: Path, **settings: object) -> Summary:
    return analyzed(path, **settings).summary


def shown(summary: Summary, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, summary)
    return console.file.getvalue()


@each_case(
    "settings",
    [
        {},
        {"syncs": False},
        {"syncs": False, "ahead": 6},
        {"num_buckets": 1},
        {"noise": 0.2},
        {"on_host": (0, 1)},
        {"num_ranks": 16},
        {"num_ranks": 1, "hosts": ("n0",)},
        {"has_enqueue": False},
        {"clock_error_ns": {1: 3 * MS}},
        {"clock_error_ns": {3: -3 * MS}},
    ],
    ids=str,
)
def test_a_sound_run_with_host_times_of_devices_is_neither_healthy_nor_anybodys_fault(tmp_path, settings):
    verdict = summarized(tmp_path / "run", **settings).verdict
    assert (verdict.mode, verdict.culprits, verdict.confidence) == ("cannot tell", (), 0.0)
    assert "host times" in verdict.headline


@each_case(
    "settings",
    [
        {},
        {"syncs": False},
        {"syncs": False, "ahead": 6},
        {"num_buckets": 1},
        {"noise": 0.1},
        {"on_host": (0, 1)},
        {"num_ranks": 16},
        {"num_ranks": 3, "hosts": ("n0", "n1", "n2")},
        {"clock_error_ns": {1: 3 * MS}},
    ],
    ids=str,
)
def test_a_straggler_that_arrivals_and_durations_on_the_device_show_is_named(tmp_path, settings):
    verdict = summarized(tmp_path / "run", slow=SLOW, **settings).verdict
    assert verdict.mode == "persistent straggler"
    assert [culprit.id for culprit in verdict.culprits] == ["2"]
    assert 0.2 < verdict.culprits[0].effect < 0.35


def test_two_stragglers_of_eight_are_both_named(tmp_path):
    verdict = summarized(tmp_path / "run", num_ranks=8, slow={2: 1.3, 5: 1.3}).verdict
    assert sorted(culprit.id for culprit in verdict.culprits) == ["2", "5"]


def test_a_rank_whose_host_is_slow_is_named_by_its_arrivals(tmp_path):
    verdict = summarized(tmp_path / "run", slow_host={2: 8.0}).verdict
    assert [culprit.id for culprit in verdict.culprits] == ["2"]


def test_a_late_rank_whose_clock_is_wrong_is_not_named_and_never_healthy(tmp_path):
    summary = summarized(tmp_path / "run", slow=SLOW, clock_error_ns={2: 3 * MS})
    assert summary.verdict.mode == "cannot tell"
    assert summary.causes.suspected_ranks == (2,)


def test_nobody_is_named_where_collectives_have_host_times_as_well(tmp_path):
    assert summarized(tmp_path / "run", slow=SLOW, has_enqueue=False).verdict.mode == "cannot tell"


@pytest.mark.parametrize("slow", [{}, SLOW], ids=["sound", "slow"])
def test_figures_that_rest_on_phases_are_null_in_the_summary(tmp_path, slow):
    summary = json.loads(json.dumps(summarized(tmp_path / "run", slow=slow).to_json()))
    assert summary["unknown"] == "not known: phases are host times of ranks with a device"
    assert set(summary["shares"].values()) == {None}
    assert summary["jitter"] is None
    assert (summary["hotspots"], summary["sensitivity"]) == ([], [])
    causes = summary["causes"]
    assert (causes["gains"], causes["origins"], causes["path"]) == ([], [], [])
    assert (causes["rebuild_error"], causes["traced_share"], causes["bubble"]) == (None, None, None)
    for row in summary["ranks"]:
        assert (row["parts_ns"], row["shares"], row["busy_share"], row["excess"]) == (None, None, None, None)
        assert row["step_ns"] > 0
    assert {role["parts_ns"] for role in summary["roles"]} == {None}


def test_parts_of_ranks_without_a_device_are_shown_beside_those_that_are_not_known(tmp_path):
    summary = summarized(tmp_path / "run", on_host=(0, 1))
    assert [row.parts_ns is None for row in summary.ranks] == [False, False, True, True]
    assert [row.excess for row in summary.ranks] == [None] * 4
    assert "?: not known: phases are host times of ranks with a device" in shown(summary)


@each_case("width", [80, 120])
@each_case("slow", [{}, SLOW], ids=["sound", "slow"])
def test_the_terminal_says_what_is_not_known_and_shows_no_number_for_it(tmp_path, slow, width):
    text = shown(summarized(tmp_path / "run", slow=slow), width)
    assert text.count("not known: phases are host times of ranks with a device") >= 5
    for claim in ("busy ", "began at", "critical path", "A 1.", "of communication hidden", "would have been detected"):
        assert claim not in text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("slow", [{}, SLOW], ids=["sound", "slow"])
def test_the_page_leaves_out_the_plots_of_what_is_not_known(tmp_path, slow):
    found = analyzed(tmp_path / "run", slow=slow)
    # Terms are links to the glossary.
    text = re.sub(r"<[^>]+>", "", page(found.summary, found.summary.verdict, found.plots))
    assert "no plot of own delay: not known: phases are host times of ranks with a device" in text
    for name in ("phase-shares", "own-delay", "origins", "gains"):
        assert f'"{name}"' not in text.split("plotly.js")[0]


def test_terminal_and_page_have_host_and_device_of_each_phase(tmp_path):
    found = analyzed(tmp_path / "run", has_device_times=True)
    text = re.sub(r"<[^>]+>", " ", page(found.summary, found.summary.verdict, found.plots))
    lines = [line.split() for line in shown(found.summary).splitlines()]
    assert {row.phase for row in found.summary.devices} >= {"forward", "backward", "optimizer"}
    for row in found.summary.devices:
        times = [format_duration(each) for each in (row.host_ns, row.device_ns, row.lead_ns)]
        assert re.search(r"\s+".join(map(re.escape, [row.phase, *times, percent(row.dry_share)])), text)
        assert [row.phase, *" ".join([*times, percent(row.dry_share)]).split()] in lines


def device_timed(path: Path, **settings: object) -> Summary:
    return summarized(path, has_device_times=True, **settings)


@each_case("settings", LAYOUTS, ids=str)
def test_with_device_times_a_sound_run_is_healthy(tmp_path, settings):
    summary = device_timed(tmp_path / "run", **settings)
    assert (summary.verdict.mode, summary.verdict.culprits) == ("healthy", ())
    assert summary.unknown == ""


@each_case("settings", LAYOUTS, ids=str)
def test_with_device_times_a_slow_device_is_named_with_its_excess_and_stage(tmp_path, settings):
    verdict = device_timed(tmp_path / "run", slow=SLOW, **settings).verdict
    assert verdict.mode == "persistent straggler"
    (culprit,) = verdict.culprits
    assert culprit.id == "2"
    assert culprit.effect == pytest.approx(0.3, abs=0.01)
    assert verdict.findings[0].stages[0].stages == ("computation",)


def test_parts_of_the_step_are_what_the_device_worked(tmp_path):
    summary = device_timed(tmp_path / "run", noise=0.0, syncs=False)
    parts = summary.ranks[1].parts_ns
    assert parts["forward"] == pytest.approx(10 * MS, rel=0.01)
    assert parts["backward"] == pytest.approx(20 * MS, rel=0.01)
    assert parts["optimizer"] == pytest.approx(3 * MS, rel=0.01)
    # Of four buckets the transfer of the last one is not hidden.
    assert parts["sync_transfer"] == pytest.approx(1 * MS, rel=0.02)
    assert summary.shares.overlap == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("blocks", [False, True])
def test_waits_for_a_slow_device_are_exposed_on_the_others(tmp_path, blocks):
    summary = device_timed(tmp_path / "run", noise=0.0, slow=SLOW, blocks=blocks)
    waits = [row.exposed_wait_ns for row in summary.ranks]
    late_ns = 0.3 * (0.1 + 10 + 20 + 3) * MS
    assert waits[2] == 0
    assert [waits[rank] for rank in (0, 1, 3)] == pytest.approx([late_ns] * 3, rel=0.03)
    assert [row.rank for row in summary.causes.origins] == [2]


def test_a_rank_without_most_of_its_device_times_leaves_the_run_unknown(tmp_path):
    summary = device_timed(tmp_path / "run", lost_times={1: tuple(range(10, 60))})
    assert summary.verdict.mode == "cannot tell"
    assert "rank 1" in summary.verdict.headline
    assert summary.shares.busy is None


def test_steps_whose_device_times_are_not_known_are_left_out(tmp_path):
    summary = device_timed(tmp_path / "run", lost_times={1: (20, 21), 3: (59,)})
    assert summary.verdict.mode == "healthy"
    assert summary.steps.num_used == 60 - 4 - 3
    assert summary.cut_off.ranks == ()


def test_operations_on_disk_are_measured_like_those_in_memory(tmp_path):
    run = DeviceRun(has_device_times=True, slow=SLOW).write(tmp_path / "run")
    attempt = run.last_attempt()
    in_memory = analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary
    on_disk = read_attempt(attempt, most_rows=0, tables=TABLES_USED)
    assert analyze_traces(run, attempt, on_disk, Selection()).summary == in_memory


def test_phases_of_the_host_alone_are_not_those_of_the_device(tmp_path):
    run = DeviceRun(has_device_times=True).write(tmp_path / "run")
    (trace, *_) = read_attempt(run.last_attempt()).traces
    (view,) = on_devices([trace])
    phases, of_file = view.tables["phases"], trace.tables["phases"]
    assert (phases["begin_ns"] == of_file["device_begin_ns"]).all()
    assert (phases["host_begin_ns"] == of_file["begin_ns"]).all()
    assert on_devices([view])[0] is view


@pytest.mark.parametrize("is_known", [True, False])
def test_recorded_idle_time_of_a_device_is_taken_as_it_is_and_left_out_of_host_times(tmp_path, is_known):
    run = DeviceRun(has_device_times=True).write(tmp_path / "run")
    (trace, *_) = read_attempt(run.last_attempt()).traces
    phases, steps = trace.tables["phases"], trace.tables["steps"]
    forward = np.flatnonzero(phases["phase"] == Phase.FORWARD)
    idle = {name: phases[name][forward].copy() for name in phases}
    idle["phase"][:] = Phase.IDLE
    idle["end_ns"] = idle["begin_ns"] = idle["device_begin_ns"]
    idle["device_end_ns"] = idle["device_begin_ns"] + 1000
    if not is_known:  # of most steps no time of the device
        steps = Table({**steps, "device_end_ns": np.zeros_like(steps["device_end_ns"])})
    given = replace(trace, tables={**trace.tables, "steps": steps, "phases": join_tables([phases, Table(idle)])})
    (view,) = on_devices([given])
    found = view.tables["phases"].select(view.tables["phases"]["phase"] == Phase.IDLE)
    assert is_on_device(view) == is_known
    if is_known:
        assert (found["end_ns"] - found["begin_ns"]).tolist() == [1000] * len(forward)
        assert set(found["during"].tolist()) == {Phase.FORWARD}
        assert on_devices([view])[0] is view
    else:
        assert len(found) == 0 and len(view.tables["phases"]) == len(phases)


def with_host(*phases: Phase, factor: float = 1.6) -> dict[str, object]:
    """Return work of which some phases take the host longer to issue than the device to do, in many small kernels."""
    return {
        "work": tuple(
            replace(work, host_ns=factor * work.device_ns, num_kernels=1000) if work.phase in phases else work
            for work in STEP
        )
    }


COMPUTE = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@pytest.mark.parametrize("syncs", [True, False])
def test_a_host_that_issues_work_too_slowly_is_host_bound(tmp_path, syncs):
    verdict = device_timed(tmp_path / "run", syncs=syncs, **with_host(*COMPUTE)).verdict
    assert verdict.mode == "host-bound"
    assert verdict.culprits[0].id == "backward"
    assert "cannot tell how much" in verdict.headline and "torch.compile" in verdict.next[0]


def test_a_slow_phase_of_the_host_behind_a_synchronisation_is_named(tmp_path):
    verdict = device_timed(tmp_path / "run", **with_host(Phase.FORWARD)).verdict
    assert (verdict.mode, verdict.culprits[0].id) == ("host-bound", "forward")


def test_a_slow_phase_of_a_host_that_stays_ahead_costs_nothing(tmp_path):
    assert device_timed(tmp_path / "run", syncs=False, **with_host(Phase.FORWARD)).verdict.mode == "healthy"


def test_waiting_for_data_is_input_bound_only_where_the_device_waits(tmp_path):
    work = tuple(replace(each, host_ns=20 * MS) if each.phase is Phase.DATA else each for each in STEP)
    verdict = device_timed(tmp_path / "run", work=work).verdict
    assert (verdict.mode, verdict.loss_share) == ("input-bound", pytest.approx(20 / 54, abs=0.02))
    assert device_timed(tmp_path / "ahead", work=work, syncs=False).verdict.mode == "healthy"


@pytest.mark.parametrize("syncs", [True, False])
def test_a_rank_whose_host_alone_is_slow_is_a_straggler_by_its_host(tmp_path, syncs):
    verdict = device_timed(tmp_path / "run", syncs=syncs, slow_host={2: 8.0}).verdict
    assert verdict.mode == "persistent straggler"
    assert [culprit.id for culprit in verdict.culprits] == ["2"]
    assert verdict.findings[0].stages[0].stages == ("waiting for the host",)
    assert len(verdict.findings) == 1


def test_garbage_collection_of_the_host_counts_where_its_device_waits_for_it(tmp_path):
    pauses_ns = np.zeros((60, 4))
    pauses_ns[::10] = 60 * MS
    summary = device_timed(tmp_path / "run", pauses_ns=pauses_ns)
    assert (summary.verdict.mode, summary.verdict.variety) == ("runtime and control plane", "garbage collection")
    pauses_ns[::10] = 5 * MS
    assert device_timed(tmp_path / "hidden", pauses_ns=pauses_ns).verdict.mode == "healthy"


def test_host_and_device_times_of_phases_and_the_lead_are_shown(tmp_path):
    summary = device_timed(tmp_path / "run", noise=0.0, syncs=False, ahead=2)
    forward = next(row for row in summary.devices if row.phase == "forward")
    assert (forward.host_ns, forward.device_ns) == pytest.approx((3 * MS, 10 * MS), rel=0.01)
    assert forward.lead_ns > 20 * MS
    assert forward.dry_share == 0
    assert "Host and device" in shown(summary)
    assert summarized(tmp_path / "host", slow=SLOW).devices == ()


@pytest.mark.parametrize(("name", "said"), [("phases", "cannot tell"), ("collectives", "healthy")])
def test_without_phases_or_operations_nobody_is_blamed(tmp_path, name, said):
    traces = read_attempt(DeviceRun(has_device_times=True).write(tmp_path / "run").last_attempt()).traces
    empty = [replace(trace, tables={**trace.tables, name: trace.tables[name].select(slice(0))}) for trace in traces]
    verdict = examine(empty)
    assert (verdict.mode, verdict.findings) == (said, ())


@each_case("value", [-5, 2**62, 1])
def test_damaged_device_times_blame_nobody(tmp_path, value):
    traces = list(read_attempt(DeviceRun(has_device_times=True).write(tmp_path / "run").last_attempt()).traces)
    steps = traces[1].tables["steps"]
    for column in ("device_begin_ns", "device_end_ns"):
        columns = {name: steps[name].copy() for name in steps}
        columns[column][::3] = value
        traces[1] = replace(traces[1], tables={**traces[1].tables, "steps": Table(columns)})
        assert examine(traces).findings == ()


@pytest.mark.parametrize("is_left", [(), (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)], ids=["none", "compute"])
def test_device_times_that_show_no_wait_for_collectives_are_never_healthy(tmp_path, is_left):
    run = DeviceRun(has_device_times=True, slow=SLOW).write(tmp_path / "run")
    traces = [
        replace(trace, tables={**trace.tables, "phases": phases.select(np.isin(phases["phase"], is_left))})
        for trace in read_attempt(run.last_attempt()).traces
        if (phases := trace.tables["phases"])
    ]
    verdict = examine(traces)
    assert [culprit.id for culprit in verdict.culprits] == ["2"]
    assert "arrivals on the device" in verdict.why[1]
