"""The last second of a job from its dumps."""

from __future__ import annotations

from pathlib import Path

from known_dumps import MS, hung_job, write

from hpcpace.core.text import NS_PER_S
from hpcpace.runs.imports.dump_view import chrome_trace, last_of_ranks
from hpcpace.runs.imports.dumps import read_dumps


def test_each_rank_has_what_it_finished_and_where_it_stands(tmp_path: Path) -> None:
    rows = last_of_ranks(read_dumps([write(tmp_path, hung_job())]), NS_PER_S)
    first, _, culprit, _ = rows
    assert (first.num_finished, first.num_open, first.stands_in) == (5, 1, "all_reduce 6 of default_pg")
    assert first.since_ns == 0
    assert (culprit.rank, culprit.num_finished, culprit.num_open, culprit.stands_in) == (2, 5, 0, "")


def test_what_ended_before_is_left_out(tmp_path: Path) -> None:
    rows = last_of_ranks(read_dumps([write(tmp_path, hung_job())]), 20 * MS)
    assert [(row.num_finished, row.num_open) for row in rows] == [(2, 1), (2, 1), (2, 0), (2, 1)]


def test_the_timeline_has_a_track_for_each_rank_and_group(tmp_path: Path) -> None:
    trace = chrome_trace(read_dumps([write(tmp_path, hung_job())]), NS_PER_S)
    events = trace["traceEvents"]
    names = {(event["pid"], event["name"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names[0, "process_name"] == "rank 0"
    assert names[3, "thread_name"] == "default_pg"
    finished = [event for event in events if event["ph"] == "X" and event["args"]["finished"]]
    assert len(finished) == 20
    assert {event["dur"] for event in finished} == {1000.0}  # one millisecond, in microseconds
    (still_open,) = (event for event in events if event["pid"] == 1 and event["name"] == "all_reduce 6 (open)")
    assert still_open["ts"] + still_open["dur"] == NS_PER_S / 1000
