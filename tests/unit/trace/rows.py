"""A header, and one row of every table, for the tests of traces."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TABLES, TraceHeader, round_times, row_dtypes
from hpcpace.trace.tables import Table


def header(rank: int = 0, **changes: Any) -> TraceHeader:
    values: dict[str, Any] = {
        "run_id": "golden", "attempt": 0, "rank": rank, "world_size": 2, "local_rank": rank, "local_size": 2, "node": 0,
        "host": "n1", "topology_addr": "spine.leaf1.n1", "job_id": "17", "boot_id": "boot", "host_key": "key",
        "cpus": "0-3,8", "mesh": "dp=2,pp=1,tp=1", "dp": rank, "pp": 0, "tp": 0, "samples_unit": "tokens",
        "interfaces": ("eth0", "ib0"), "created_unix_ns": 1_700_000_000_000_000_000, "hpcpace_version": "0.1.0",
        **changes,
    }  # fmt: skip
    return TraceHeader(**values)


_CARRIED = (1 << 33, 1 << 32, 1 << 31, 2896, 8_800_000, 7_000, 90_000, 32_800, 210, 7 << 20, 64, 3, 1448, 1, 12)
_GPU = (1980, 71, 640_000, 700_000, 3, 0, 5, 2, 1)
_OF_1_5 = (17, 1 << 29, 19, 40, 16_000_000, *range(1_000_000, 16_000_000, 1_000_000))


def add_one_of_each(recorder: Recorder) -> None:
    recorder.add_group(0, 0, b"world", b"gloo")
    recorder.add_group(0, 1, b"world", b"gloo")
    recorder.add_step(0, 1_000_000, 9_000_000, 4096, 1)
    recorder.add_phase(0, 1, 1_100_000, 3_000_001, -1)
    recorder.add_collective(0, 0, 0, 0, 1 << 20, -1, 3_072_000, 4_096_000, 512_000, 1)
    recorder.add_clock(0, 900_000, -123_456, 20_000, 9_000, 40)
    recorder.add_pacing(0, 3, 1, 3_000_000, 50_000, 80_000, -7)
    recorder.add_network(1_000_000, 1, 1 << 40, 1 << 41, 3, 2, 70, 11, 5, 9, 1, 100_000_000_000, 2)
    recorder.add_host(1_000_000, 3, 1, 0, 1 << 30, 1 << 34, 1410, 4, 2, 0, 900_000, 70_000, 80_000, *_GPU, *_OF_1_5)
    recorder.add_event(9_000_000, 0, 4, 3, b"sys.exit")
    recorder.add_connection(0, 1, b"n2", b"10.0.0.1:4711", b"10.0.0.2:29500", b"eth0")
    recorder.add_flow(1_000_000, 0, *_CARRIED)


ADDERS = {
    "steps": "add_step",
    "phases": "add_phase",
    "collectives": "add_collective",
    "groups": "add_group",
    "clock": "add_clock",
    "pacing": "add_pacing",
    "network": "add_network",
    "host": "add_host",
    "events": "add_event",
    "connections": "add_connection",
    "flows": "add_flow",
}


def random_rows(table: str, num_rows: int, *, device_tables: Collection[str] = ()) -> np.ndarray:
    """Rows over the whole range of every column; the first two hold the least and the largest values."""
    dtype = row_dtypes(device_tables)[table]
    choose = np.random.default_rng(num_rows)
    rows = np.zeros(num_rows, dtype=dtype)
    for name in dtype.names or ():
        kind = dtype[name]
        if kind.kind == "S":
            rows[name] = [b"name-%d" % number for number in range(num_rows)]
            rows[name][:2] = [b"", b"x" * kind.itemsize]
            continue
        enum, bounds = TABLES[table].enums.get(name), np.iinfo(kind)
        least, largest = (min(enum), max(enum)) if enum else (bounds.min, bounds.max)
        rows[name] = choose.integers(least, largest, size=num_rows, dtype=kind, endpoint=True)
        rows[name][:2] = [least, largest]
    return rows


def record(recorder: Recorder, table: str, rows: np.ndarray) -> np.ndarray:
    """Record rows of a table, and return them as they must be read."""
    add = getattr(recorder, ADDERS[table])
    for row in rows.tolist():
        add(*row)
    rounded = rows.copy()
    round_times(table, rounded)
    return rounded


def assert_table(found: Table, expected: np.ndarray) -> None:
    assert list(found) == list(expected.dtype.names or ())
    for name in found:
        assert found[name].dtype == expected.dtype[name], name
        assert np.array_equal(found[name], expected[name]), name
