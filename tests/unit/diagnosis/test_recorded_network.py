"""From the tables of traces to the figures of the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.analyze import Analysis, analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.schema import row_dtypes
from hpcpace.trace.tables import RankTrace, Table

S = 1_000_000_000
MB = 1_000_000


def rows(table: str, columns: dict[str, Any], num_rows: int) -> Table:
    made = np.zeros(num_rows, row_dtypes()[table])
    for name, values in columns.items():
        made[name] = values
    return Table.from_rows(made)


def with_network(trace: RankTrace, *, foreign: int = 0, has_flows: bool = True) -> RankTrace:
    """Return a trace with counters once a second: 50 MB/s each way over eth0 to the other host, and foreign traffic."""
    steps = trace.tables["steps"]
    times = np.arange(steps["begin_ns"][0] - 2 * S, steps["end_ns"][-1] + 3 * S, S)
    seconds = (times - times[0]) // S
    rank, num_ranks = trace.header.rank, trace.header.world_size
    own, other = rank + 1, (rank + num_ranks // 2) % num_ranks + 1
    tables = dict(trace.tables)
    framed = int(50 * MB * (1 + 66 / 1448 + 66 / 65536))
    tables["network"] = rows(
        "network",
        {
            "time_ns": times,
            "interface": 1,
            "tx_bytes": framed * seconds,
            "rx_bytes": (framed + foreign) * seconds,
            "rate_bps": 1_000_000_000,
        },
        len(times),
    )
    if has_flows:
        tables["connections"] = rows(
            "connections",
            {"peer_rank": -1, "local": f"10.0.0.{own}:1", "remote": f"10.0.0.{other}:1", "interface": "eth0"},
            1,
        )
        counted = 50 * MB * seconds
        tables["flows"] = rows(
            "flows",
            {
                "time_ns": times,
                "sent_bytes": counted,
                "acked_bytes": counted,
                "received_bytes": counted,
                "busy_ns": seconds * S // 2,
            },
            len(times),
        )
    return replace(trace, header=replace(trace.header, interfaces=("lo", "eth0")), tables=tables)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory):
    run = SyntheticRun(num_ranks=2, num_steps=80, hosts=("n0", "n1")).write(tmp_path_factory.mktemp("run") / "run")
    return run, run.attempts()[-1]


def analysis(read, changed) -> Analysis:
    run, attempt = read
    found = read_attempt(attempt)
    return analyze_traces(run, attempt, AttemptTraces([changed(t) for t in found.traces], ()), Selection())


def test_what_traces_recorded_is_in_the_summary_and_in_the_plots(read) -> None:
    found = analysis(read, lambda trace: with_network(trace, foreign=47_500_000 * trace.header.rank))
    network = found.summary.network
    assert network is not None
    assert [(row.host, row.interface) for row in network.interfaces] == [("n1", "eth0"), ("n0", "eth0")]
    assert network.interfaces[0].received.foreign_utilisation == pytest.approx(0.38, abs=0.005)
    assert not network.interfaces[1].received.is_foreign
    assert {(row.source, row.destination) for row in network.pairs} == {(0, 1), (1, 0)}
    assert network.median_rate_bps == pytest.approx(800e6, rel=0.01)
    assert found.plots.network is not None


def test_a_rank_without_connections_in_its_trace_leaves_foreign_traffic_unknown(read) -> None:
    found = analysis(read, lambda trace: with_network(trace, has_flows=trace.header.rank == 0))
    network = found.summary.network
    assert network is not None
    assert {row.host: row.why_unknown for row in network.interfaces} == {
        "n0": "",
        "n1": "not all ranks of the host recorded their connections",
    }


def test_traces_without_any_of_it_have_no_network(read) -> None:
    assert analysis(read, lambda trace: trace).summary.network is None


def test_a_rank_without_a_trace_may_have_been_on_any_host(tmp_path) -> None:
    run = SyntheticRun(num_ranks=4, num_steps=80, hosts=("n0", "n1"), missing=(3,)).write(tmp_path / "run")
    network = analysis((run, run.attempts()[-1]), with_network).summary.network
    assert network is not None
    assert {row.why_unknown for row in network.interfaces} == {"not all ranks of the host recorded their connections"}
    # Its address is in no trace of its own, so that nobody can tell whose it is.
    assert {(row.source, row.destination) for row in network.pairs} == {(0, 2), (2, 0)}
