"""Timelines, read back by Perfetto's own classes: what they show of runs whose truth is known."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import BACKWARD_NS, FORWARD_NS, MS, TRANSFER_NS, Extra, SyntheticRun
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import RunDirectory
from hpcpace.runs.timeline.run_file import WrittenTimeline, write_timeline
from hpcpace.runs.timeline.tracks import Slice, Wanted, nested_rows
from tests.device_run import DeviceRun

pytest.importorskip("perfetto")

ERROR_NS = 2_000  # of clocks that are known to a microsecond


@dataclass
class Seen:
    """A slice that was read back."""

    name: str
    begin_ns: int
    arguments: dict[str, Any]
    from_here: list[int]
    to_here: list[int]
    end_ns: int | None = None


@dataclass
class ReadBack:
    """A trace: slices by process and track, counters likewise."""

    processes: dict[int, str] = field(default_factory=dict)
    slices: dict[tuple[str, str], list[Seen]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, rank: int, track: str) -> list[Seen]:
        (found,) = [slices for (process, name), slices in self.slices.items() if _is(process, rank) and track == name]
        return found

    def tracks(self, rank: int) -> set[str]:
        return {name for process, name in self.slices if _is(process, rank)}


def _is(process: str, rank: int) -> bool:
    return process.startswith(f"rank {rank} ")


def read_back(path: Path) -> ReadBack:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace, found = Trace(), ReadBack()
    trace.ParseFromString(path.read_bytes())
    tracks: dict[int, tuple[str, str]] = {}
    names: dict[int, str] = {}
    keys: dict[int, str] = {}
    stacks: dict[int, list[Seen]] = defaultdict(list)
    for packet in trace.packet:
        names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
        keys |= {entry.iid: entry.name for entry in packet.interned_data.debug_annotation_names}
        descriptor, event = packet.track_descriptor, packet.track_event
        if packet.HasField("track_descriptor"):
            if descriptor.HasField("process"):
                assert descriptor.process.pid > 0
                found.processes[descriptor.uuid] = descriptor.process.process_name
                tracks[descriptor.uuid] = (descriptor.process.process_name, "")
            elif descriptor.parent_uuid:
                tracks[descriptor.uuid] = (tracks[descriptor.parent_uuid][0], descriptor.name)
            else:
                tracks[descriptor.uuid] = (descriptor.name, "")
            continue
        track = tracks[event.track_uuid]
        if event.type == TrackEvent.TYPE_COUNTER:
            found.counters[track].append((packet.timestamp, event.double_counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            arguments = {
                keys[one.name_iid]: getattr(one, one.WhichOneof("value") or "") for one in event.debug_annotations
            }
            one = Seen(
                names[event.name_iid],
                packet.timestamp,
                arguments,
                list(event.flow_ids),
                list(event.terminating_flow_ids),
            )
            found.slices[track].append(one)
            stacks[event.track_uuid].append(one)
        else:
            stacks[event.track_uuid].pop().end_ns = packet.timestamp
    return found


def _write(run: RunDirectory, tmp_path: Path, **wanted: Any) -> tuple[WrittenTimeline, ReadBack]:
    made = write_timeline(
        run,
        run.last_attempt(),
        Wanted(**wanted),
        target=tmp_path / "out.pftrace",
        memory_bytes=1 << 30,
        begin_stage=lambda _: lambda _done, _total: None,
    )
    return made, read_back(made.path)


def _range(first: int, stop: int) -> dict[str, Any]:
    return {"first": first, "stop": stop, "is_range": True}


def test_phases_and_operations_stand_on_the_common_clock(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=3, slow={2: 1.5}, offsets_ns={1: 70 * MS, 2: -30 * MS}).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(10, 12))
    assert sorted(seen.processes.values()) == [f"rank {rank} on n0, process" for rank in range(3)]
    forwards = [next(one for one in seen.of(rank, "phases") if one.name == "forward") for rank in range(3)]
    assert np.ptp([one.begin_ns for one in forwards]) < ERROR_NS
    lengths = [one.end_ns - one.begin_ns for one in forwards if one.end_ns is not None]
    assert lengths == pytest.approx([FORWARD_NS, FORWARD_NS, 1.5 * FORWARD_NS], abs=ERROR_NS)
    late_ns = (FORWARD_NS + BACKWARD_NS) // 2
    for rank, wait_ns in ((0, late_ns), (1, late_ns), (2, None)):
        slices = seen.of(rank, "collectives, group default of 3 ranks")
        names = [one.name for one in slices]
        assert names == (["all_reduce", "wait", "transfer"] * 2 if wait_ns else ["all_reduce"] * 2)
        if wait_ns:
            operation, wait, transfer = slices[:3]
            assert wait.arguments["waits for"] == "rank 2"
            assert (wait.end_ns or 0) - wait.begin_ns == pytest.approx(wait_ns, abs=ERROR_NS)
            assert (transfer.end_ns or 0) - transfer.begin_ns == pytest.approx(TRANSFER_NS, abs=ERROR_NS)
            assert operation.arguments["bytes"] == 4096


def test_arrows_lead_from_the_late_rank_to_each_rank_that_waited_and_to_no_other(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, slow={2: 1.5}).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, **_range(10, 13))
    sources, targets = defaultdict(list), {}
    for (process, _), slices in seen.slices.items():
        for one in slices:
            for number in one.from_here:
                sources[number].append((process, one))
            for number in one.to_here:
                assert number not in targets
                targets[number] = (process, one)
    assert made.written.num_arrows == len(targets) == 3 * 3 and set(sources) == set(targets)
    for number, ((source, begun),) in sources.items():
        target, ended = targets[number]
        assert source == "rank 2 on n0, process" and target != source and begun.name == "all_reduce"
        assert ended.begin_ns > begun.begin_ns  # else the arrow points back


def test_waits_within_the_error_of_the_clocks_have_no_arrow(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, slow={2: 1.01}, halfwidth_ns=MS).write(tmp_path / "run")
    made, _ = _write(run, tmp_path, **_range(10, 13))
    assert made.written.num_arrows == 0


def test_no_arrow_points_back_where_a_clock_is_wrong(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, slow={2: 1.2}, clock_error_ns={1: 3 * MS, 3: -4 * MS}).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, **_range(10, 13))
    slices = [one for found in seen.slices.values() for one in found]
    begins = {number: one.begin_ns for one in slices for number in one.from_here}
    ends = {number: one.begin_ns for one in slices for number in one.to_here}
    assert made.written.num_arrows == len(ends) > 0 and begins.keys() == ends.keys()
    assert all(ends[number] > begin_ns for number, begin_ns in begins.items())
    (told,) = [text for text in made.shown.problems if "a clock is wrong by more than its half-width" in text]
    assert told.startswith("3 exits from collectives seem to come before the last rank has entered")
    right = SyntheticRun(num_ranks=4, slow={2: 1.2}, offsets_ns={1: 3 * MS}).write(tmp_path / "right")
    assert _write(right, tmp_path, **_range(10, 13))[0].shown.problems == ()


def test_a_rank_whose_steps_are_at_another_time_does_not_stretch_the_timeline(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, slow={2: 1.2}, clock_error_ns={1: 10_000 * MS}).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, **_range(10, 13))
    assert [text for text in made.shown.problems if "the steps of rank 1 are at another time" in text]
    ends = [one.end_ns for found in seen.slices.values() for one in found if one.end_ns]
    begins = [one.begin_ns for found in seen.slices.values() for one in found]
    assert max(ends) - min(begins) < 200 * MS
    assert made.written.num_arrows == 0  # nobody knows who was last, the rank itself included


def test_where_the_steps_of_no_rank_are_at_the_time_of_others_there_are_no_others(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=2, clock_error_ns={1: 10_000 * MS}).write(tmp_path / "run")
    made, _ = _write(run, tmp_path, **_range(10, 13))
    (problem,) = (text for text in made.shown.problems if "the steps of" in text)
    assert problem.startswith("the steps of ranks 0-1 are at different times") and "others" not in problem


def test_without_a_range_the_slowest_step_is_shown_with_its_neighbours(tmp_path: Path) -> None:
    slow = Extra(rank=1, length_ns=50 * MS, every=17)
    run = SyntheticRun(num_ranks=2, num_steps=30, extras=(slow,)).write(tmp_path / "run")
    made, seen = _write(run, tmp_path)
    assert (made.shown.slowest, made.shown.step.tolist()) == (17, [15, 16, 17, 18, 19])
    assert [one.name for one in seen.of(0, "steps")] == [f"step {step}" for step in range(15, 20)]


def test_slices_of_a_row_are_nested_and_others_get_a_row_of_their_own() -> None:
    slices = [Slice(0, 10, "a"), Slice(2, 4, "b"), Slice(4, 12, "c"), Slice(10, 11, "d"), Slice(5, None, "e")]
    rows = [[(time, one.name, begins) for time, one, begins in row] for row in nested_rows(slices)]
    assert rows == [
        [
            (0, "a", True),
            (2, "b", True),
            (4, "b", False),
            (10, "a", False),
            (10, "d", True),
            (11, "d", False),
        ],
        [(4, "c", True), (12, "c", False)],
        [(5, "e", True)],
    ]


def test_the_error_of_each_clock_is_a_counter(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=2, halfwidth_ns=5_000).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(3, 5))
    values = [value for _, value in seen.counters["rank 1 on n0, process", "clock error (us)"]]
    assert len(values) == 4 and min(values) >= 5.0
    assert {value for _, value in seen.counters["rank 0 on n0, process", "clock error (us)"]} == {0.0}


def test_ranks_with_a_device_have_phases_of_it_and_of_their_host(tmp_path: Path) -> None:
    run = DeviceRun(num_ranks=2, has_device_times=True).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(10, 12))
    assert {"steps", "phases, device", "phases, host"} <= seen.tracks(0)
    device, host = (
        sum((one.end_ns or 0) - one.begin_ns for one in seen.of(0, name) if one.name == "backward")
        for name in ("phases, device", "phases, host")
    )
    assert device > 2 * host  # 20 ms of kernels, issued in 4


def test_a_rank_without_a_trace_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, missing=(1,)).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, **_range(3, 5))
    assert len(seen.processes) == 3
    assert any("rank 1 left no trace" in problem for problem in made.shown.problems)


def test_a_rank_whose_clock_is_unknown_ends_with_the_others(tmp_path: Path) -> None:
    hosts = ("n0", "n1")
    run = SyntheticRun(num_ranks=2, hosts=hosts, offsets_ns={1: 900 * MS}, has_clock=False).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, **_range(3, 5))
    assert any("clock of rank 1 is unknown" in problem for problem in made.shown.problems)
    assert seen.of(1, "steps")[-1].end_ns == seen.of(0, "steps")[-1].end_ns
    assert "rank 1 on n1, process" not in {process for process, _ in seen.counters}


def test_of_a_job_that_hangs_what_never_completed_has_no_end(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=3, num_steps=10, hangs=True).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(9, 11))
    (stuck,) = seen.of(1, "never completed")
    assert (stuck.name, stuck.end_ns) == ("all_reduce, never completed", None)
    assert "never completed" not in seen.tracks(0)


@each_case("host", ["<script>alert(1)</script>", "a\x1b[31mb\n", "n" * 500, "\u202enode"])
def test_names_from_files_are_shown_as_text(tmp_path: Path, host: str) -> None:
    run = SyntheticRun(num_ranks=2, hosts=(host,)).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(3, 5))
    for name in seen.processes.values():
        assert name.isprintable() and len(name) < 80


def test_all_waits_stand_together_in_the_order_of_ranks(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=12, slow={10: 1.5}).write(tmp_path / "run")
    _, seen = _write(run, tmp_path, **_range(10, 12))
    waits = {
        name: slices for (process, name), slices in seen.slices.items() if process == "All ranks: who waits for whom"
    }
    assert list(waits) == [f"rank {rank} on n0" for rank in range(12) if rank != 10]
    for slices in waits.values():
        assert [(one.name, one.arguments) for one in slices] == [
            ("for rank 10", {"operation": "all_reduce", "step": step}) for step in (10, 11)
        ]
        assert [(one.end_ns or 0) - one.begin_ns for one in slices] == pytest.approx(
            [(FORWARD_NS + BACKWARD_NS) // 2] * 2, abs=ERROR_NS
        )


def test_chosen_ranks_still_know_for_whom_they_waited(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, slow={2: 1.5}).write(tmp_path / "run")
    made, seen = _write(run, tmp_path, ranks=frozenset({0}), **_range(10, 11))
    assert list(seen.processes.values()) == ["rank 0 on n0, process"] and made.written.num_arrows == 0
    assert seen.of(0, "collectives, group default of 4 ranks")[1].arguments["waits for"] == "rank 2"


def test_of_too_many_ranks_the_late_one_is_among_those_shown(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=40, num_steps=6, slow={29: 1.5}).write(tmp_path / "run")
    made, _ = _write(run, tmp_path, **_range(3, 5), most_slices=400)
    assert 16 <= len(made.shown.ranks) < 40 and 29 in made.shown.ranks
    assert any("of 40 ranks are shown" in problem for problem in made.shown.problems)


@each_case(
    ("wanted", "said"),
    [
        (_range(100, 110), "no step of this run, which has 40 steps, 0 to 39"),
        ({"ranks": frozenset({7})}, "no rank with a trace: this run has ranks 0-1"),
        ({**_range(0, 40), "most_slices": 50}, "choose fewer steps"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_what_there_is(tmp_path: Path, wanted: dict[str, Any], said: str) -> None:
    run = SyntheticRun(num_ranks=2).write(tmp_path / "run")
    with pytest.raises(HpcpaceError, match=said) as error:
        _write(run, tmp_path, **wanted)
    assert error.value.exit_code == 2 and not (tmp_path / "out.pftrace").exists()


def test_a_run_without_a_step_is_told(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=2, num_steps=0).write(tmp_path / "run")
    with pytest.raises(HpcpaceError, match="no rank has recorded a step") as error:
        _write(run, tmp_path)
    assert error.value.exit_code == 3


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SyntheticRun(num_ranks=2).write(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder", None)
    with pytest.raises(HpcpaceError, match=r"pip install 'hpcpace\[timeline\]'") as error:
        _write(run, tmp_path)
    assert error.value.exit_code == 2
