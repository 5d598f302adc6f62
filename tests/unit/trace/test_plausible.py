from __future__ import annotations

from pathlib import Path

import numpy as np
from cases import each_case

from hpcpace.trace.schema import DEVICE_TABLES, TABLES, ExitKind, TraceHeader, row_dtypes
from hpcpace.trace.tables import MAX_NS, MAX_SIZE, RankTrace, Table, without_implausible

HEADER = TraceHeader(run_id="r", attempt=0, rank=3, world_size=4, local_rank=0, local_size=1, node=0, host="n")
LIMITS = np.iinfo(np.int64)


def trace(**columns: object) -> RankTrace:
    """Return a trace with three rows in each table, and these columns as TABLE__COLUMN."""
    tables = {}
    for name in TABLES:
        rows = np.ones(3, row_dtypes(DEVICE_TABLES)[name])
        for key, values in columns.items():
            of, column = key.split("__")
            if of == name:
                rows[column] = values
        tables[name] = Table.from_rows(rows)
    none = tables["collectives"].select(slice(0))
    return RankTrace(Path("rank-00003.h5"), HEADER, tables, ("before",), True, none)


def test_a_sound_trace_stays_as_it_is():
    sound = trace()
    assert without_implausible(sound) is sound


@each_case(
    ("column", "value"),
    [
        ("steps__step", -1),
        ("steps__begin_ns", LIMITS.min),
        ("steps__end_ns", LIMITS.max),
        ("steps__samples", -1),
        ("phases__end_ns", MAX_NS + 1),
        ("steps__device_begin_ns", LIMITS.max),
        ("steps__device_end_ns", -MAX_NS - 1),
        ("phases__device_begin_ns", LIMITS.min),
        ("phases__device_end_ns", MAX_NS + 1),
        ("collectives__enqueue_ns", LIMITS.min),
        ("collectives__bytes", MAX_SIZE + 1),
        ("collectives__blocked_ns", -1),
        ("collectives__seq", LIMITS.min),
        ("clock__halfwidth_ns", -1),
        ("clock__offset_ns", LIMITS.max),
        ("account__dropped", -5),
    ],
)
def test_rows_with_values_that_cannot_be_are_left_out_and_said(column, value):
    table, name = column.split("__")
    found = without_implausible(trace(**{column: [1, value, 1]}))
    assert found.tables[table][name].tolist() == [1, 1]
    assert found.problems[0] == "before"
    assert f"rank-00003.h5: 1 of 3 rows of {table} have impossible values, such as {name} {value}" in found.problems[1]


def test_rows_with_several_such_values_are_counted_once():
    found = without_implausible(trace(steps__begin_ns=[LIMITS.min, 1, 1], steps__end_ns=[LIMITS.max, LIMITS.max, 1]))
    assert len(found.tables["steps"]) == 1
    assert "2 of 3 rows of steps" in found.problems[1]


def test_unknown_times_of_a_device_are_possible():
    unknown = trace(phases__device_begin_ns=0, phases__device_end_ns=0, steps__device_end_ns=0)
    assert without_implausible(unknown) is unknown


def test_the_end_of_an_operation_that_never_completed_may_be_anything():
    never = trace(collectives__exit_ns=[1, LIMITS.max, 1], collectives__exit_kind=ExitKind.NEVER)
    assert without_implausible(never) is never


@each_case("seed", range(20))
def test_what_is_left_is_within_bounds_whatever_was_there(seed):
    random = np.random.default_rng(seed)
    columns = {
        f"{name}__{column}": random.integers(LIMITS.min, LIMITS.max, size=3)
        for name, column in (("steps", "begin_ns"), ("collectives", "enter_ns"), ("clock", "offset_ns"))
    }
    found = without_implausible(trace(**columns))
    for key in columns:
        name, column = key.split("__")
        assert (np.abs(found.tables[name][column].astype(np.float64)) <= MAX_NS).all()
