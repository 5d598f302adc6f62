"""Profiles of torch.profiler as runs."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case
from kineto_files import (
    NUM_STEPS,
    REDUCED_US,
    STEP_US,
    event,
    facts,
    gloo_events,
    kernel_by_kernel,
    nccl_events,
    rccl_events,
    sharded_events,
    write,
)

from hpcpace.core.config import Config
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.runs.imports.imported_run import Import, write_run
from hpcpace.runs.imports.kineto import import_kineto
from hpcpace.trace.schema import Op, Phase

DATA = Path(__file__).parents[2] / "data" / "imports"
MS = 1_000_000


def report(found: Import, path: Path) -> Summary:
    write_run(path, found)
    run = open_run(path)
    analysis = analyze(run, run.last_attempt(), Selection(), Config(), begin_stage=lambda _: lambda *_: None)
    assert analysis is not None
    return analysis.summary


def gloo_run(folder: Path, **changed: Any) -> Import:
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", gloo_events(rank, **changed), facts(rank))
    return import_kineto([folder])


def test_the_published_profile_has_its_collectives_and_cannot_tell_with_one_rank_of_two(tmp_path: Path) -> None:
    """15 all-reduce and 6 broadcast kernels, the first all-reduce of the file 2,636.669 us."""
    found = import_kineto([DATA / "nccl_data.json.gz"])
    rows = found.ranks[0].tables["collectives"]
    assert [int((rows["op"] == op).sum()) for op in (Op.ALL_REDUCE, Op.BROADCAST)] == [15, 6]
    lengths_us = (rows["exit_ns"] - rows["enter_ns"]) / 1000
    assert np.abs(lengths_us - 2_636.669).min() < 0.001
    assert rows["bytes"][rows["op"] == Op.ALL_REDUCE].max() == 4 * 7_875_584
    assert found.ranks[0].tables["steps"]["step"].tolist() == [4, 5, 6]
    assert (rows["enqueue_ns"] <= rows["enter_ns"]).all() and (rows["enqueue_ns"] < rows["enter_ns"]).any()
    summary = report(found, tmp_path / "run")
    assert summary.verdict.headline.startswith("cannot tell: rank 1 of 2 has no usable trace")


def test_a_late_rank_over_gloo_is_the_straggler_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    summary = report(gloo_run(tmp_path / "profiles", late_us=3_000.0), tmp_path / "run")
    assert summary.throughput.p50_ns == pytest.approx((STEP_US + 3_000) * 1000, rel=1e-3)
    assert summary.causes is not None and summary.causes.origins[0].rank == 0
    assert "torch.profiler" in summary.world.imported and "samples" in summary.world.imported


def test_operations_of_unknown_groups_are_no_ground_for_a_verdict_on_transfers(tmp_path: Path) -> None:
    """A fifth of the step is in an all-reduce: with groups known it is transfer, else it may be a wait."""
    verdicts = []
    for name, groups in (("known", facts(0)["distributedInfo"]["pg_config"]), ("unknown", [])):
        folder = tmp_path / name
        folder.mkdir()
        for rank in (0, 1):
            said = facts(rank)
            said["distributedInfo"]["pg_config"] = groups
            write(folder / f"rank-{rank}.json", gloo_events(rank), said)
        verdicts.append(report(import_kineto([folder]), tmp_path / f"run-{name}").verdict)
    assert [verdict.mode for verdict in verdicts] == ["communication-bound", "cannot tell"]
    assert "20.0 % of the step time is in operations that match no other rank's" in verdicts[1].headline


def _group_events(rank: int, members: dict[int, str]) -> list[dict[str, Any]]:
    """Return `nccl_events` whose kernels alone say who their group is; `members` by rank."""
    events = nccl_events(rank, late_us=3_000.0)
    for one in events:
        if one["name"].startswith("nccl"):
            one["args"] |= {"Process Group Name": "7", "Process Group Ranks": members[rank]}
    return events


@each_case(("members", "size"), [("[0, 1, 2, 3]", 4), ("[0, 1, 2, 3, 4, 5]", 6), ("[0, 1, ..., 3]", 4), ("[0, -1]", 4)])
def test_members_of_groups_are_those_that_kernels_say_where_nothing_else_does(
    tmp_path: Path, members: str, size: int
) -> None:
    """All but rank 0 wait 3 of 13 ms for it. Dots are what PyTorch writes for members of a large group."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    said = facts(0)
    del said["distributedInfo"]
    for rank in range(4):
        write(folder / f"rank-{rank}.json", _group_events(rank, dict.fromkeys(range(4), members)), said)
    found = import_kineto([folder])
    assert {one.header.world_size for one in found.ranks} == {size}
    shares = report(found, tmp_path / "run").shares
    if members == "[0, 1, 2, 3]":
        assert shares.exposed_wait == pytest.approx(0.75 * 3 / 13, rel=0.01)
        assert shares.transfer == pytest.approx(2 / 13, rel=0.01)
        assert not any("process group" in note for note in found.source.notes)
    else:
        assert shares.exposed_wait is None and shares.transfer == pytest.approx((2 + 0.75 * 3) / 13, rel=0.01)


def test_a_group_whose_members_kernels_contradict_is_not_known(tmp_path: Path) -> None:
    events = nccl_events(0)
    kernels = [one for one in events if one["name"].startswith("nccl")]
    for number, one in enumerate(kernels):
        one["args"] |= {"Process Group Name": "7", "Process Group Ranks": f"[0, {1 + (number == 5)}]"}
    said = facts(0)
    del said["distributedInfo"]
    found = import_kineto([write(tmp_path / "rank-0.json", events, said)])
    assert any(note.startswith(f"{NUM_STEPS} collectives match no other rank's") for note in found.source.notes)


def test_phases_and_waits_over_gloo_are_those_of_the_profile(tmp_path: Path) -> None:
    one, other = gloo_run(tmp_path, late_us=3_000.0).ranks
    for rank, wait_us in ((one, 0.0), (other, 3_000.0)):
        phases = rank.tables["phases"]
        lengths = {phase: (phases["end_ns"] - phases["begin_ns"])[phases["phase"] == phase] / 1000 for phase in Phase}
        assert set(lengths[Phase.FORWARD]) == {2_000} and set(lengths[Phase.OPTIMIZER]) == {1_000}
        assert lengths[Phase.GRAD_SYNC].tolist() == pytest.approx([REDUCED_US + wait_us] * NUM_STEPS)
        rows = rank.tables["collectives"]
        assert ((rows["exit_ns"] - rows["enter_ns"]) / 1000).tolist() == pytest.approx(
            [REDUCED_US + wait_us + 100] * 24
        )
        assert rows["step"].tolist() == list(range(3, 27)) and not rows["blocked_ns"].any()


def test_operations_that_autograd_does_not_overtake_block_their_caller(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", sharded_events(rank, late_us=3_000.0), facts(rank))
    found = import_kineto([folder])
    for one, gather_us in zip(found.ranks, (REDUCED_US, REDUCED_US + 3_000), strict=True):
        rows = one.tables["collectives"]
        blocked_us = {op: rows["blocked_ns"][rows["op"] == op] / 1000 for op in (Op.ALL_GATHER, Op.ALL_REDUCE)}
        assert blocked_us[Op.ALL_GATHER].tolist() == [gather_us] * NUM_STEPS
        assert blocked_us[Op.ALL_REDUCE].tolist() == [REDUCED_US] * NUM_STEPS
    summary = report(found, tmp_path / "run")
    assert summary.verdict.mode == "persistent straggler" and summary.verdict.culprits[0].id == "0"


def test_steps_without_marks_end_with_the_optimizer(tmp_path: Path) -> None:
    found = gloo_run(tmp_path, with_steps=False)
    steps = found.ranks[0].tables["steps"]
    assert (
        steps["step"].tolist() == list(range(NUM_STEPS)) and "steps: the ends of optimizer steps" in found.source.notes
    )
    assert np.diff(steps["end_ns"]).tolist() == [10 * MS] * (NUM_STEPS - 1)


def test_optimizers_that_step_one_after_the_other_end_one_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = gloo_events(rank, with_steps=False)
        for update in [one for one in events if one["name"].startswith("Optimizer")]:
            begin = update["ts"]
            update["dur"] = 400.0
            events.append(event("Optimizer.step#Adam.step", "user_annotation", begin + 500, begin + 950))
        write(tmp_path / f"r{rank}.json", events, facts(rank))
    for one in import_kineto([tmp_path]).ranks:
        steps, phases = one.tables["steps"], one.tables["phases"]
        assert len(steps) == NUM_STEPS and set(np.diff(steps["end_ns"]).tolist()) == {10 * MS}
        assert (phases["phase"] == Phase.OPTIMIZER).sum() == 2 * NUM_STEPS


def test_optimizers_with_backward_passes_between_them_end_a_step_each(tmp_path: Path) -> None:
    events = gloo_events(0, with_steps=False)
    for one in [one for one in events if one["name"].startswith("Optimizer")]:
        end = one["ts"] + 1_000
        events.append(event("autograd::engine::evaluate_function: X", "cpu_op", end, end + 100))
        events.append(event("Optimizer.step#Adam.step", "user_annotation", end + 100, end + 300))
    assert len(import_kineto([write(tmp_path / "r0.json", events, facts(0))]).ranks[0].tables["steps"]) == 2 * NUM_STEPS


def test_optimizer_steps_alone_are_a_step_each(tmp_path: Path) -> None:
    events = [one for one in gloo_events(0) if one["name"].startswith("Optimizer")]
    assert import_kineto([write(tmp_path / "r0.json", events, facts(0))]).num_steps == NUM_STEPS


def test_steps_whose_numbers_begin_again_are_numbered_in_order_of_time(tmp_path: Path) -> None:
    length_us = NUM_STEPS * STEP_US
    offsets_us = (length_us + 5e6, length_us, 0.0)
    events = [one for offset_us in offsets_us for one in gloo_events(0, offset_us=offset_us)]
    found = import_kineto([write(tmp_path / "r0.json", events, facts(0))])
    steps, rows = (found.ranks[0].tables[table] for table in ("steps", "collectives"))
    numbers = [*range(3, 3 + 2 * NUM_STEPS), *range(4 + 2 * NUM_STEPS, 4 + 3 * NUM_STEPS)]
    assert steps["step"].tolist() == numbers == rows["step"].tolist()
    assert (np.diff(steps["begin_ns"]) > 0).all()
    source = "steps: ProfilerStep of torch.profiler, numbered in order of time, for its numbers repeat or fall"
    assert source in found.source.notes


@each_case("with_steps", [False, True])
@each_case("later", [0, 1])
def test_a_profile_that_begins_a_step_later_has_the_steps_of_the_others(
    tmp_path: Path, later: int, with_steps: bool
) -> None:
    """Steps are numbered by each file from its own first step on."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in (0, 1):
        events = gloo_events(rank)
        if rank == later:
            events = events[6:]
        kept = [one for one in events if with_steps or not one["name"].startswith("ProfilerStep")]
        write(folder / f"r{rank}.json", _counted_from_0(kept), facts(rank))
    found = import_kineto([folder])
    rows = [one.tables["collectives"] for one in found.ranks]
    _, *shared = np.intersect1d(rows[0]["seq"], rows[1]["seq"], return_indices=True)
    assert len(shared[0]) == NUM_STEPS - 1
    ends, steps = ([of[name][at] for of, at in zip(rows, shared, strict=True)] for name in ("exit_ns", "step"))
    assert (ends[0] == ends[1]).all() and (steps[0] == steps[1]).all()
    assert min(one.tables["steps"]["step"].min() for one in found.ranks) == 0
    assert not found.problems and any("numbered as those of rank 0" in note for note in found.source.notes)
    summary = report(found, tmp_path / "run")
    assert summary.verdict.mode == "communication-bound"
    assert summary.verdict.loss_share == pytest.approx(REDUCED_US / STEP_US, rel=0.01)


def _counted_from_0(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [one for one in events if one["name"].startswith("ProfilerStep")]
    for number, one in enumerate(steps):
        one["name"] = f"ProfilerStep#{number}"
    return events


def test_steps_that_are_numbered_lower_stay_as_they_are_where_they_can(tmp_path: Path) -> None:
    renamed = [one | {"name": one["name"].replace("ProfilerStep#", "ProfilerStep#1")} for one in gloo_events(1)[:42]]
    write(tmp_path / "r0.json", gloo_events(0), facts(0))
    write(tmp_path / "r1.json", renamed, facts(1))
    found = import_kineto([tmp_path])
    assert [one.tables["steps"]["step"][0] for one in found.ranks] == [3, 3]


def test_collectives_of_one_clock_that_never_overlap_match_nothing(tmp_path: Path) -> None:
    """The other job on that host reduces while this one computes."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in (0, 1):
        write(folder / f"r{rank}.json", gloo_events(rank, offset_us=5_000.0 * rank), facts(rank))
    found = import_kineto([folder])
    assert len(found.problems) == 1 and "rank 1 and rank 0 do not overlap in time" in found.problems[0]
    assert report(found, tmp_path / "run").verdict.mode == "cannot tell"


@pytest.mark.parametrize("make", [gloo_events, nccl_events])
def test_profiles_of_one_host_that_share_no_step_are_named(
    tmp_path: Path, make: Callable[[int], list[dict[str, Any]]]
) -> None:
    """As files of different cycles of a schedule."""
    events = make(0)
    per_step = len(events) // NUM_STEPS
    write(tmp_path / "r0.json", events[: per_step * 10], facts(0))
    write(tmp_path / "r1.json", make(1)[per_step * 12 :], facts(1))
    found = import_kineto([tmp_path])
    (problem,) = found.problems
    assert "r1.json: rank 1 was recorded while rank 0 was not" in problem and "of the same cycle" in problem
    assert [len(one.tables["steps"]) for one in found.ranks] == [10, NUM_STEPS - 12]


@pytest.mark.parametrize("has_numbers", [False, True])
def test_a_profile_of_a_device_that_begins_later_has_the_steps_of_the_others(tmp_path: Path, has_numbers: bool) -> None:
    """Numbers of collectives, where they are recorded, are of the whole job, whatever steps are counted from."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in range(4):
        events = nccl_events(rank, late_us=3_000.0)
        if rank == 3:
            events = [one for one in events if one["ts"] >= 1_000_000.0 + 10 * (STEP_US + 3_000.0)]
        for one in events:
            if not has_numbers:
                one["args"].pop("Seq", None)
        write(folder / f"r{rank}.json", _counted_from_0(events), facts(rank, 4, backend="nccl"))
    found = import_kineto([folder])
    assert found.ranks[3].tables["steps"]["step"].tolist() == list(range(10, NUM_STEPS))
    rows = [one.tables["collectives"] for one in found.ranks]
    assert rows[3]["seq"].tolist() == rows[0]["seq"][10:].tolist() and not found.problems
    assert any("numbered as those of rank 0" in note and "by 10 higher" in note for note in found.source.notes)
    summary = report(found, tmp_path / "run")
    assert summary.steps.num_used == NUM_STEPS - 10 and not summary.kinds[0].num_unmatched
    assert summary.shares.exposed_wait == pytest.approx(0.75 * 3 / 13, rel=0.01)
    assert not summary.cut_off.ranks


def test_clocks_of_two_hosts_are_aligned_by_their_collectives(tmp_path: Path) -> None:
    offset_us = 7_000_000.0
    for rank in (0, 1):
        events = gloo_events(rank, late_us=200.0, offset_us=offset_us * rank)
        write(tmp_path / f"r{rank}.json", events, facts(rank, host=f"n{rank}"))
    found = import_kineto([tmp_path])
    clock = found.ranks[1].tables["clock"]
    assert (np.abs(clock["offset_ns"] - offset_us * 1000) <= clock["halfwidth_ns"]).all()
    assert 0 < clock["halfwidth_ns"].max() <= 2 * (REDUCED_US + 400) * 1000 and (clock["ref_rank"] == 0).all()
    assert any("aligned by collectives" in note for note in found.source.notes)


@pytest.mark.parametrize("host", ["n1", "n2"])
def test_a_profile_cut_off_before_its_base_takes_that_of_the_others(tmp_path: Path, host: str) -> None:
    write(tmp_path / "r0.json", gloo_events(0), facts(0))
    said = facts(1, host=host)
    del said["baseTimeNanoseconds"]
    write(tmp_path / "r1.json", gloo_events(1), said)
    found = import_kineto([tmp_path])
    begins = [one.tables["steps"]["begin_ns"].tolist() for one in found.ranks]
    assert begins[0] == begins[1] and begins[0][0] == 1_000 * MS
    assert any(note.startswith("rank 1: times count from where those of other files do") for note in found.source.notes)


def test_times_that_are_dates_need_no_base(tmp_path: Path) -> None:
    said = [facts(0), facts(1)]
    del said[1]["baseTimeNanoseconds"]
    write(tmp_path / "r0.json", gloo_events(0), said[0])
    write(tmp_path / "r1.json", gloo_events(1, offset_us=1.7e15), said[1])
    found = import_kineto([tmp_path])
    begins = [one.tables["steps"]["begin_ns"].tolist() for one in found.ranks]
    assert begins[1] == pytest.approx(begins[0], abs=1_000) and len(found.ranks) == 2


def test_a_profile_that_counts_from_no_known_time_is_left_out_of_dated_ones(tmp_path: Path) -> None:
    for rank, offset_us in ((0, 1.7e15), (1, 0.0)):
        said = facts(rank)
        del said["baseTimeNanoseconds"]
        write(tmp_path / f"r{rank}.json", gloo_events(rank, offset_us=offset_us), said)
    found = import_kineto([tmp_path])
    assert [one.header.rank for one in found.ranks] == [0] and "r1.json does not say what" in found.problems[0]
    assert found.ranks[0].tables["steps"]["begin_ns"][0] == 1_000 * MS


def test_a_rank_without_rows_does_not_shift_the_others(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", gloo_events(0), facts(0))
    write(tmp_path / "r1.json", [event("aten::add", "cpu_op", 10.0, 20.0)], facts(1))
    assert import_kineto([tmp_path]).ranks[0].tables["steps"]["begin_ns"][0] == 1_000 * MS


@each_case(
    ("table", "prefix"), [("collectives", "gloo"), ("steps", "ProfilerStep"), ("phases", "DistributedDataParallel")]
)
@each_case("field", ["ts", "dur"])
@each_case("value", [None, -3.0])
def test_events_without_a_duration_are_left_out_and_counted(
    tmp_path: Path, table: str, prefix: str, field: str, value: float | None
) -> None:
    whole, events = gloo_events(0), gloo_events(0)
    damaged = [one for one in events if one["name"].startswith(prefix)][:2]
    for one in damaged:
        one.pop(field)
        one |= {} if value is None else {field: value}
    unused = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1.0}
    found = import_kineto([write(tmp_path / "r0.json", [unused, *events], facts(0))])
    expected = import_kineto([write(tmp_path / "whole.json", whole, facts(0))])
    assert len(found.ranks[0].tables[table]) == len(expected.ranks[0].tables[table]) - 2
    assert found.problems == [f"{tmp_path / 'r0.json'}: 2 events without a duration left out"]
    assert (
        "durations of 2 events" in found.source.unknown
        and len(found.source.unknown) == len(expected.source.unknown) + 1
    )


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    found = gloo_run(tmp_path)
    assert len({one.header.host_key for one in found.ranks}) == 1
    assert all("clock" not in one.tables for one in found.ranks)


def test_collectives_of_another_run_contradict_each_other(tmp_path: Path) -> None:
    events = gloo_events(1)
    for number, one in enumerate(events):
        one["ts"] += (number // 6) ** 2 * 3_000
    write(tmp_path / "r0.json", gloo_events(0), facts(0, host="n0"))
    write(tmp_path / "r1.json", events, facts(1, host="n1"))
    found = import_kineto([tmp_path])
    assert len(found.problems) == 1 and "collectives of rank 1 and rank 0 contradict each other" in found.problems[0]
    assert "clocks of rank 1" in found.source.unknown and "clock" not in found.ranks[1].tables
    assert report(found, tmp_path / "run").verdict.mode == "cannot tell"


def test_collectives_that_contradict_each_other_by_drift_still_align_clocks(tmp_path: Path) -> None:
    events = gloo_events(1)
    for number, one in enumerate(events):
        one["ts"] += number // 6 % 2 * (2 * (REDUCED_US + 100) + 50)
    write(tmp_path / "r0.json", gloo_events(0), facts(0, host="n0"))
    write(tmp_path / "r1.json", events, facts(1, host="n1"))
    found = import_kineto([tmp_path])
    assert not found.problems and len(found.ranks[1].tables["clock"])
    assert "collectives contradict each other by up to 50.0 us: clocks drift" in found.source.notes


@each_case("host", ["n0", "n1"])
@each_case("offset_us", [-3_600e6, 3_600e6])
def test_profiles_that_were_recorded_hours_apart_are_of_different_jobs(
    tmp_path: Path, host: str, offset_us: float
) -> None:
    write(tmp_path / "r0.json", gloo_events(0, offset_us=7_200e6), facts(0, host="n0"))
    write(tmp_path / "r1.json", gloo_events(1, offset_us=7_200e6 + offset_us), facts(1, host=host))
    with pytest.raises(TraceError, match=r"profiles of different jobs.* apart"):
        import_kineto([tmp_path])


def test_a_rank_without_a_common_collective_has_no_clock(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", gloo_events(0), facts(0, host="n0"))
    write(tmp_path / "r1.json", [one for one in gloo_events(1) if "gloo" not in one["name"]], facts(1, host="n1"))
    found = import_kineto([tmp_path])
    assert "clock" not in found.ranks[1].tables
    assert any(note.startswith("rank 1 shares no collective") for note in found.source.notes)


def test_a_device_passes_a_mark_when_what_was_launched_before_has_ended(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", nccl_events(rank, late_us=1_000.0), facts(rank, backend="nccl"))
    late, early = import_kineto([tmp_path]).ranks
    phases = early.tables["phases"]
    origin = early.tables["steps"]["begin_ns"][0]
    first = {int(row["phase"]): row for row in phases[:3]}
    assert first[Phase.FORWARD]["device_end_ns"] - origin == 3 * MS
    assert first[Phase.BACKWARD]["device_end_ns"] - origin == 6 * MS
    assert first[Phase.OPTIMIZER]["device_end_ns"] - origin == int(9.5 * MS)
    rows = early.tables["collectives"]
    assert (rows["blocked_ns"] == int((REDUCED_US + 1_000) * 1000)).all() and rows["seq"].tolist() == list(range(24))
    assert (late.tables["collectives"]["blocked_ns"] == int(REDUCED_US * 1000)).all()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_devices_whose_kernels_are_not_told_are_no_ground_for_a_verdict(tmp_path: Path, is_recorded: bool) -> None:
    """Profiles of the host alone, and kernels of NCCL that do not say so of which a device's work may consist."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in range(4):
        events = nccl_events(rank, late_us=3_000.0)
        events = [one for one in events if is_recorded or one["cat"] == "user_annotation"]
        for one in events:
            if one["name"].startswith("nccl"):
                one |= {"name": "ncclDevKernel_Generic", "args": {}}
        write(folder / f"rank{rank}.json", events, facts(rank, 4, backend="nccl"))
    found = import_kineto([folder])
    assert "what devices did" in found.source.unknown
    summary = report(found, tmp_path / "run")
    assert summary.verdict.headline.startswith("cannot tell: phases of ranks 0-3 are host times")


@each_case(
    "how",
    [
        {},
        {"by_time": True},
        {"name": "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)"},
        {"name": "mscclKernel_Sum_float_Simple", "by_time": True},
    ],
)
def test_kernels_of_rccl_are_what_the_host_has_called(tmp_path: Path, how: dict[str, Any]) -> None:
    for name, events in (("nccl", nccl_events), ("rccl", partial(rccl_events, **how))):
        (tmp_path / name).mkdir()
        for rank in range(4):
            write(tmp_path / name / f"rank{rank}.json", events(rank, late_us=3_000.0), facts(rank, 4, backend="nccl"))
    nccl, rccl = (import_kineto([tmp_path / name]) for name in ("nccl", "rccl"))
    for one, other in zip(nccl.ranks, rccl.ranks, strict=True):
        for table, rows in one.tables.items():
            assert rows.tolist() == other.tables[table].tolist()
    assert nccl.source.notes == rccl.source.notes and nccl.source.unknown == rccl.source.unknown


@pytest.mark.parametrize(("lost", "is_known"), [(3, True), (24, False)])
def test_kernels_launched_before_the_profile_take_only_their_steps_with_them(
    tmp_path: Path, lost: int, is_known: bool
) -> None:
    (folder := tmp_path / "profiles").mkdir()
    for rank in range(4):
        events = rccl_events(rank, late_us=3_000.0, lost=lost if rank == 2 else 0)
        write(folder / f"rank{rank}.json", events, facts(rank, 4, backend="nccl"))
    found = import_kineto([folder])
    (note,) = [one for one in found.source.notes if "of NCCL left out" in one]
    assert note.startswith(f"{lost} kernels of NCCL left out")
    assert ("what devices did" in found.source.unknown) is not is_known
    summary = report(found, tmp_path / "run")
    if is_known:
        assert summary.verdict.mode == "persistent straggler" and summary.verdict.culprits[0].id == "0"
        assert summary.steps.num_used == 24 - lost and summary.shares.busy is not None
    else:
        assert summary.world.missing == (2,)


def _shares_of(folder: Path, **how: Any) -> tuple[Summary, dict[str, float]]:
    """Return the report on a job of four such ranks, and by their JSON the shares of compute and of idle time."""
    folder.mkdir()
    events = kernel_by_kernel(**how)
    for rank in range(4):
        write(folder / f"rank{rank}.json", events, facts(rank, 4, backend="nccl"))
    kernels = [one for one in events if one["cat"] == "kernel"]
    length = sum(one["dur"] for one in events if one["name"].startswith("ProfilerStep"))
    compute = sum(one["dur"] for one in kernels if one["name"] == "gemm") / length
    summary = report(import_kineto([folder]), folder / "run")
    return summary, {"busy": compute, "idle": 1 - sum(one["dur"] for one in kernels) / length}


def test_a_device_that_waits_for_each_launch_is_host_bound_by_the_gaps_between_its_kernels(tmp_path: Path) -> None:
    """Its last kernel of a pass ends after the host's, as if it had run ahead."""
    summary, truth = _shares_of(tmp_path / "profiles", kernel_us=10.0, every_us=50.0, is_ahead=False)
    assert summary.verdict.mode == "host-bound"
    assert summary.ranks[0].shares["host"] == pytest.approx(truth["idle"], abs=0.03)
    assert summary.shares.busy == pytest.approx(truth["busy"], abs=0.03)


def test_a_device_that_works_while_its_host_waits_for_it_is_busy(tmp_path: Path) -> None:
    summary, truth = _shares_of(tmp_path / "profiles", kernel_us=50.0, every_us=0.0, is_ahead=True)
    assert summary.verdict.mode != "host-bound" and truth["busy"] > 0.95
    assert summary.shares.busy == pytest.approx(truth["busy"], abs=0.03)


@pytest.mark.parametrize("is_known", [True, False])
def test_idle_time_that_no_launch_explains_is_neither_work_nor_the_hosts(tmp_path: Path, is_known: bool) -> None:
    """As between the kernels of a CUDA graph, which the host launches as one."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    events = kernel_by_kernel(kernel_us=10.0, every_us=50.0, is_ahead=False)
    first: dict[str, float] = {}
    for one in sorted(events, key=lambda one: (one["ts"], one["cat"] == "cuda_runtime")):
        if one["name"].startswith("ProfilerStep"):
            first = {"ts": one["ts"]}
        elif one["cat"] == "cuda_runtime":
            one["ts"] = first["ts"]
    kept = [one for one in events if is_known or one["cat"] != "cuda_runtime" or one["args"]["correlation"] % 2]
    for rank in range(4):
        write(folder / f"rank{rank}.json", kept, facts(rank, 4, backend="nccl"))
    summary = report(import_kineto([folder]), folder / "run")
    kernels, steps = (
        sum(one["dur"] for one in events if one["name"].startswith(name)) for name in ("gemm", "ProfilerStep")
    )
    assert summary.verdict.mode != "host-bound"
    assert summary.shares.busy == pytest.approx(kernels / steps, abs=0.05)


def test_kernels_of_which_no_launch_is_known_are_of_no_phase(tmp_path: Path) -> None:
    """The host issues all work of a step within 2.5 ms, and its phases end long before the device's.

    That rank 0 comes late to the collectives of the devices is known all the same.
    """
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in range(4):
        kept = [one for one in nccl_events(rank, late_us=3_000.0) if one["cat"] != "cuda_runtime"]
        write(folder / f"rank{rank}.json", kept, facts(rank, 4, backend="nccl"))
    found = import_kineto([folder])
    assert "what devices did" in found.source.unknown
    assert any(note.startswith("launches of kernels are not in the files") for note in found.source.notes)
    assert not any("a phase ends when all kernels" in note for note in found.source.notes)
    summary = report(found, tmp_path / "run")
    assert summary.shares.busy is None and summary.ranks[0].parts_ns is None
    assert summary.verdict.mode == "persistent straggler" and summary.verdict.culprits[0].id == "0"
    assert any("found by its arrivals on the device alone" in sentence for sentence in summary.verdict.why)


def test_a_late_device_is_the_straggler_of_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in range(4):
        write(folder / f"rank{rank}.json", nccl_events(rank, late_us=3_000.0), facts(rank, 4, backend="nccl"))
    summary = report(import_kineto([folder]), tmp_path / "run")
    assert summary.verdict.mode == "persistent straggler" and summary.verdict.culprits[0].id == "0"


@each_case(
    ("kernel", "called", "op"),
    [
        ("ncclDevKernel_SendRecv(x)", "all_to_allv", Op.ALL_TO_ALL),
        ("ncclDevKernel_Broadcast_RING_LL(x)", "_broadcast_oop", Op.BROADCAST),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "all_reduce_barrier", Op.BARRIER),
        ("ncclDevKernel_AllGather_RING_LL(x)", "allgather_into_tensor_coalesced", Op.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "something new", Op.REDUCE_SCATTER),
        ("ncclDevKernel_Generic(x)", "allreduce", Op.ALL_REDUCE),
        ("ncclDevKernel_Generic(x)", "", None),
    ],
)
def test_a_kernel_of_nccl_is_what_was_called_or_what_it_is_named_after(
    tmp_path: Path, kernel: str, called: str, op: Op | None
) -> None:
    events = [event(kernel, "kernel", 10.0, 20.0, **{"Collective name": called}), event("gemm", "kernel", 1.0, 5.0)]
    found = import_kineto([write(tmp_path / "a.json", events, facts(0))])
    assert found.ranks[0].tables["collectives"]["op"].tolist() == ([] if op is None else [op])
    assert any(note.startswith("1 kernel of NCCL left out") for note in found.source.notes) == (op is None)


def test_a_rank_without_a_world_is_taken_from_the_profile(tmp_path: Path) -> None:
    said = facts(1)
    del said["distributedInfo"]["world_size"]
    found = import_kineto([write(tmp_path / "a.json", gloo_events(1), said)])
    assert (found.ranks[0].header.rank, found.ranks[0].header.world_size) == (1, 2)
    assert any("taken as 2" in note for note in found.source.notes)


def test_the_rank_comes_from_the_name_where_no_distributed_info_says_it(tmp_path: Path) -> None:
    for rank in (0, 3):
        write(tmp_path / f"rank-{rank}.Nov_01.pt.trace.json", gloo_events(rank), {"schemaVersion": 1})
    found = import_kineto([tmp_path])
    assert [one.header.rank for one in found.ranks] == [0, 3] and found.ranks[0].header.world_size == 4
    assert any("the rank is that of the file's name" in note for note in found.source.notes)
    assert any("taken as 4" in note for note in found.source.notes)


def test_packed_profiles_and_single_files_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", gloo_events(0), facts(0))
    packed = tmp_path / "x" / "rank1.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(write(tmp_path / "rank1.json", gloo_events(1), facts(1)).read_bytes()))
    assert [one.header.rank for one in import_kineto([path, packed]).ranks] == [0, 1]


def _twice(folder: Path) -> None:
    for name in ("a", "b"):
        write(folder / f"{name}.json", gloo_events(0), facts(0))


def _nameless(folder: Path) -> None:
    for name in ("a", "b"):
        write(folder / f"{name}.json", gloo_events(0), {})


def _two_jobs(folder: Path) -> None:
    write(folder / "a.json", gloo_events(0), facts(0, 2))
    write(folder / "b.json", gloo_events(1), facts(1, 4))


def _beyond(folder: Path) -> None:
    write(folder / "rank7.json", gloo_events(0), {})
    write(folder / "b.json", gloo_events(1), facts(1, 4))


def _nothing_usable(folder: Path) -> None:
    (folder / "a.json").write_text("[]")
    (folder / "b.json").write_text("")


def _infinite(folder: Path) -> None:
    write(folder / "a.json", [event("Optimizer.step#x", "user_annotation", 1e300, 2e300)], facts(0))


@each_case(
    ("make", "message"),
    [
        (lambda folder: None, "holds no .json"),
        (_twice, "are both of rank 0"),
        (_nameless, "does not say which rank it is"),
        (_two_jobs, "profiles of different jobs"),
        (_beyond, "rank 7 is not one of 4 ranks"),
        (_nothing_usable, "no profile can be used"),
        (_infinite, "has a time of 1e.300 us, which no profile has"),
    ],
)
def test_profiles_that_make_no_run_are_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    make(tmp_path)
    with pytest.raises(TraceError, match=message):
        import_kineto([tmp_path])


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text('{"traceEvents": [{"ph"')
    write(tmp_path / "rank-0.json", gloo_events(0), facts(0))
    found = import_kineto([tmp_path])
    assert [one.header.rank for one in found.ranks] == [0]
    assert "rank-1.json is cut off" in found.problems[0] and "left out" in found.problems[0]


@pytest.mark.parametrize("is_number", [False, True])
def test_hostile_facts_are_ignored_or_made_printable(tmp_path: Path, is_number: bool) -> None:
    said = facts(0)
    said["distributedInfo"] |= {"rank": "0; rm", "pg_config": [7, {"ranks": [-4]}, {"ranks": "x"}], "backend": ["x"]}
    said["distributedInfo"] |= {"pg_config": 7} if is_number else {}
    said |= {"host_name": "n1\x1b[31m" + "x" * 500, "baseTimeNanoseconds": "soon"}
    write(tmp_path / "rank-0.json", gloo_events(0), said)
    found = import_kineto([tmp_path])
    assert found.ranks[0].header.rank == 0 and "\x1b" not in found.ranks[0].header.host
    assert len(found.ranks[0].header.host) < 100
