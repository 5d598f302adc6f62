"""Counters of interfaces and connections in a timeline, from counters that are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcpace.metrics.common_clock import CommonClock
from hpcpace.runs.timeline.run_file import Network
from hpcpace.trace.schema import TraceHeader, row_dtypes
from hpcpace.trace.tables import RankTrace, Table

S = 1_000_000_000
GBIT = 125_000_000


def _rows(table: str, *values: dict[str, Any]) -> Table:
    made = np.zeros(len(values), row_dtypes()[table])
    for row, columns in zip(made, values, strict=True):
        for name, value in columns.items():
            row[name] = value
    return Table.from_rows(made)


def _trace(rank: int, **tables: Table) -> RankTrace:
    host = f"n{rank}"
    place = {"local_rank": 0, "local_size": 1, "node": rank, "host": host, "host_key": host}
    header = TraceHeader(run_id="r", attempt=0, rank=rank, world_size=2, interfaces=("eth0", "lo"), **place)
    empty = {name: Table.from_rows(np.zeros(0, dtype)) for name, dtype in row_dtypes().items()}
    return RankTrace(Path(f"rank-{rank}.h5"), header, {**empty, **tables}, (), True, empty["collectives"])


def _network(*traces: RankTrace, span_s: tuple[float, float] = (1.2, 2.5)) -> Network:
    clock = CommonClock(local_ns=np.zeros(1, int), offset_ns=np.zeros(1, int), halfwidth_ns=np.zeros(1, int))
    shown: Any = SimpleNamespace(
        recorded=traces,
        timed=SimpleNamespace(clocks=[clock] * len(traces)),
        span_ns=tuple(int(time_s * S) for time_s in span_s),
    )
    return Network(shown)


def test_an_interface_is_a_counter_of_its_host_over_the_steps_alone() -> None:
    rows = [{"time_ns": second * S, "interface": 0, "tx_bytes": second * GBIT} for second in range(6)]
    (process,) = _network(_trace(0, network=_rows("network", *rows)), _trace(1)).hosts(7)
    sent, received = process.counters
    assert (process.name, process.number, sent.name, sent.unit) == ("network of n0", 7, "eth0 sent", "Gbit/s")
    assert sent.values.tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert sent.time_ns.tolist() == [1 * S, 2 * S, 3 * S] and not received.values.any()


def test_without_counters_there_is_no_process() -> None:
    network = _network(_trace(0), _trace(1))
    assert list(network.hosts(3)) == [] and list(network.flows(0)) == []


def test_a_flow_is_a_counter_of_its_rank_and_names_its_peer() -> None:
    def ends(local: str, remote: str) -> Table:
        one = {"connection": 0, "peer_rank": -1, "local": local, "remote": remote, "interface": "eth0"}
        return _rows("connections", one)

    samples = [
        {
            "connection": 0,
            "time_ns": second * S,
            "sent_bytes": second * GBIT,
            "acked_bytes": second * GBIT,
            "rtt_ns": 5000,
        }
        for second in range(6)
    ]
    first = _trace(0, connections=ends("10.0.0.1:1", "10.0.0.2:2"), flows=_rows("flows", *samples))
    second = _trace(1, connections=ends("10.0.0.2:2", "10.0.0.1:1"))
    found = {counter.name: counter for counter in _network(first, second).flows(0)}
    assert found["to rank 1 acknowledged"].values[0] == pytest.approx(1.0)
    assert found["to rank 1 round trip"].values[0] == pytest.approx(5.0)
