"""Flows and interfaces from traces: known counters give known differences, and damaged ones give none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cases import each_case

from hpcpace.metrics.common_clock import CommonClock
from hpcpace.metrics.flows import Flows, flows_of, interface_use
from hpcpace.metrics.topology import Topology
from hpcpace.trace.schema import TraceHeader, row_dtypes
from hpcpace.trace.tables import RankTrace, Table

S = 1_000_000_000
TOPOLOGY = Topology(
    ranks=(0, 1, 2, 3),
    node=np.array([0, 0, 1, 2]),
    leaf=np.full(4, -1),
    node_names=("n1", "n2", "n3"),
    slurm_names=("n1", "n2", "n3"),
    leaf_names=(),
)
HOSTS = ("n1", "n1", "n2", "n3")
NONE = CommonClock(local_ns=np.zeros(0, int), offset_ns=np.zeros(0, int), halfwidth_ns=np.zeros(0, int))


def rows(table: str, *values: dict[str, Any]) -> Table:
    made = np.zeros(len(values), row_dtypes()[table])
    for row, columns in zip(made, values, strict=True):
        for name, value in columns.items():
            row[name] = value
    return Table.from_rows(made)


def trace(rank: int, **tables: Table) -> RankTrace:
    header = TraceHeader(
        run_id="run", attempt=0, rank=rank, world_size=4, local_rank=0, local_size=1, node=0, host=HOSTS[rank],
        interfaces=("eth0", "lo", "ib0"),
    )  # fmt: skip
    empty = {name: Table.from_rows(np.zeros(0, dtype)) for name, dtype in row_dtypes().items()}
    return RankTrace(Path("rank.h5"), header, {**empty, **tables}, (), True, empty["collectives"])


def connections(*ends: tuple[str, str], **columns: Any) -> Table:
    values = [
        {"connection": number, "peer_rank": -1, "local": local, "remote": remote, "interface": "eth0", **columns}
        for number, (local, remote) in enumerate(ends)
    ]
    return rows("connections", *values)


def flow_rows(*values: tuple[int, int, int], **columns: Any) -> Table:
    """Rows of (connection, second, bytes sent), with more columns for all."""
    made = [
        {"connection": number, "time_ns": time_s * S, "sent_bytes": sent, "acked_bytes": sent, **columns}
        for number, time_s, sent in values
    ]
    return rows("flows", *made)


def clock(offset_ns: int = 0) -> CommonClock:
    return CommonClock(local_ns=np.zeros(1, int), offset_ns=np.array([offset_ns]), halfwidth_ns=np.zeros(1, int))


def of(*traces: RankTrace, clocks: list[CommonClock] | None = None) -> Flows:
    return flows_of(traces, clocks or [clock()] * len(traces), TOPOLOGY)


def sent(flows: Flows) -> list[tuple[int, int, int, int]]:
    columns = (flows.connection, flows.begin_ns // S, flows.end_ns // S, flows.sent_bytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


ONE = connections(("10.0.0.1:1", "10.0.0.2:2"))


def test_differences_of_consecutive_rows_are_on_the_common_clock():
    table = flow_rows((0, 10, 100), (0, 11, 160), (0, 14, 400), busy_ns=0, rtt_ns=7, segment_bytes=1448, flags=1)
    found = of(trace(0, connections=ONE, flows=table), clocks=[clock(offset_ns=2 * S)])
    assert sent(found) == [(0, 8, 9, 60), (0, 9, 12, 240)]
    assert found.rtt_ns.tolist() == [7, 7]
    assert found.segment_bytes is not None and found.segment_bytes.tolist() == [1448, 1448]


def test_rows_out_of_order_and_of_several_connections_are_put_in_order():
    ends = connections(("10.0.0.1:1", "10.0.0.2:2"), ("10.0.0.1:3", "10.0.0.2:2"))
    table = flow_rows((1, 12, 9), (0, 11, 160), (1, 11, 4), (0, 10, 100), (-1, 11, 50), (-1, 10, 0))
    assert sent(of(trace(0, connections=ends, flows=table))) == [(-1, 10, 11, 50), (0, 10, 11, 60), (1, 11, 12, 5)]


@each_case(
    ("table", "kept"),
    [
        (flow_rows((0, 10, 100), (0, 11, 5), (0, 12, 9)), [(0, 11, 12, 4)]),
        (flow_rows((0, 10, 100), (0, 10, 101), (0, 11, 102)), [(0, 10, 11, 2)]),
        (flow_rows((0, 10, 100), (0, 11, -7), (0, 12, 101)), [(0, 10, 12, 1)]),
        (flow_rows((0, 10, 100), (0, 11, 2**62), (0, 12, 101)), [(0, 10, 12, 1)]),
        (flow_rows((0, 10, 0), (0, 11, 2**45)), []),
        (flow_rows((5, 10, 100), (5, 11, 102)), []),
        (flow_rows((-3, 10, 100), (-3, 11, 102)), []),
        (flow_rows((0, 10, 100)), []),
        (flow_rows(), []),
        (rows("flows", {"time_ns": S}, {"time_ns": 2 * S, "busy_ns": 9 * S}), []),
        (rows("flows", {"time_ns": -(2**63)}, {"time_ns": 2**63 - 1}), []),
    ],
    ids=[
        "a counter starts again", "twice at one time", "negative", "beyond any counter", "faster than any link",
        "of a connection that is not listed", "of an impossible number", "one row", "no rows",
        "busy for longer than it lasted", "times at the ends of int64",
    ],
)  # fmt: skip
def test_rows_that_make_no_sense_give_no_flow(table, kept):
    assert sent(of(trace(0, connections=ONE, flows=table))) == kept


def test_of_two_connections_with_one_number_the_first_counts():
    twice = rows("connections", *({"connection": 0, "peer_rank": -1, "local": local} for local in ("a:1", "b:2")))
    assert of(trace(0, connections=twice)).connections.local == ("a:1",)


def test_connections_summed_up_may_be_busy_for_longer_than_the_interval():
    table = rows("flows", {"connection": -1, "time_ns": S}, {"connection": -1, "time_ns": 2 * S, "busy_ns": 9 * S})
    assert of(trace(0, flows=table)).busy_ns.tolist() == [9 * S]


def test_limited_time_is_part_of_busy_time():
    table = rows(
        "flows", {"time_ns": S}, {"time_ns": 2 * S, "busy_ns": 5, "receiver_limited_ns": 7, "sender_limited_ns": 3}
    )
    found = of(trace(0, connections=ONE, flows=table))
    assert (found.receiver_limited_ns.tolist(), found.sender_limited_ns.tolist()) == ([5], [3])


def test_the_peer_is_the_rank_that_has_the_mirror_image():
    found = of(
        trace(0, connections=connections(("10.0.0.1:1", "10.0.0.2:2"))),
        trace(2, connections=connections(("10.0.0.2:2", "10.0.0.1:1"))),
    ).connections
    assert (found.rank.tolist(), found.peer_rank.tolist()) == ([0, 2], [2, 0])
    assert (found.node.tolist(), found.peer_node.tolist()) == ([0, 1], [1, 0])
    assert found.interface == ("eth0", "eth0")


def test_the_host_of_a_rank_without_trace_is_that_of_its_address():
    found = of(
        trace(0, connections=connections(("[fe80::1]:1", "[fe80::2]:2"))),
        trace(2, connections=connections(("[fe80::2]:9", "[fe80::7]:8"))),
    ).connections
    assert (found.peer_rank.tolist(), found.peer_node.tolist()) == ([-1, -1], [1, -1])


def test_an_address_that_several_hosts_have_names_none():
    found = of(
        trace(0, connections=connections(("10.0.0.1:1", "172.17.0.2:2"))),
        trace(2, connections=connections(("172.17.0.2:9", "10.0.0.9:8"))),
        trace(3, connections=connections(("172.17.0.2:9", "10.0.0.9:8"))),
    ).connections
    assert found.peer_node.tolist() == [-1, -1, -1]


def test_addresses_used_again_belong_to_the_rank_that_had_them_at_the_time():
    ends = connections(("10.0.0.1:1", "10.0.0.2:2"), ("10.0.0.1:1", "10.0.0.2:2"))
    mirror = connections(("10.0.0.2:2", "10.0.0.1:1"))
    found = of(
        trace(0, connections=ends, flows=flow_rows((0, 10, 0), (0, 20, 1), (1, 30, 0), (1, 40, 1))),
        trace(2, connections=mirror, flows=flow_rows((0, 10, 0), (0, 20, 1))),
        trace(3, connections=mirror, flows=flow_rows((0, 30, 0), (0, 40, 1))),
    ).connections
    assert found.peer_rank.tolist() == [2, 3, 0, 0]


def test_a_peer_that_the_writer_knew_is_believed():
    found = of(trace(0, connections=connections(("a:1", "b:2"), peer_rank=3), flows=flow_rows())).connections
    assert (found.peer_rank.tolist(), found.peer_node.tolist()) == ([3], [2])
    named = of(trace(0, connections=connections(("a:1", "b:2"), peer_host="n2"))).connections
    assert named.peer_node.tolist() == [1]


def test_ranks_without_a_clock_have_no_flows():
    with_rows = trace(0, connections=ONE, flows=flow_rows((0, 10, 0), (0, 20, 1)))
    assert len(of(with_rows, clocks=[NONE]).connection) == 0


def test_traces_without_flows_give_none():
    found = of(trace(0), trace(2))
    assert (len(found.connection), len(found.connections.rank)) == (0, 0)


def network(*values: dict[str, Any]) -> RankTrace:
    return trace(0, network=rows("network", *values))


def test_interfaces_grow_by_name_and_lo_is_left_out():
    use = interface_use(
        [
            network(
                {"time_ns": S, "interface": 2, "tx_bytes": 5},
                {"time_ns": S, "interface": 1, "tx_bytes": 9},
                {"time_ns": S, "interface": 0, "rate_bps": 10**9},
                {"time_ns": 3 * S, "interface": 0, "tx_bytes": 70, "rx_bytes": 8, "rate_bps": 10**9, "drops": 4},
                {"time_ns": 3 * S, "interface": 1, "tx_bytes": 10},
                {"time_ns": 3 * S, "interface": 2, "tx_bytes": 6},
                {"time_ns": 3 * S, "interface": 77, "tx_bytes": 6},
            )
        ],
        [clock()],
        TOPOLOGY,
    )
    assert use.names == (("n1", "eth0"), ("n1", "ib0")) and use.node.tolist() == [0, 0]
    assert use.line_rate_bps.tolist() == [10**9, 0]
    assert (use.interface.tolist(), use.sent_bytes.tolist(), use.received_bytes.tolist()) == ([0, 1], [70, 1], [8, 0])
    assert (use.begin_ns.tolist(), use.end_ns.tolist(), use.drops.tolist()) == ([S, S], [3 * S, 3 * S], [4, 0])


def test_an_event_counter_that_starts_again_counts_as_unchanged_and_bytes_that_do_drop_the_interval():
    use = interface_use(
        [
            network(
                {"time_ns": S, "tx_bytes": 5, "errors": 9},
                {"time_ns": 2 * S, "tx_bytes": 7, "errors": 2},
                {"time_ns": 3 * S, "tx_bytes": 1, "errors": 2},
            )
        ],
        [clock()],
        TOPOLOGY,
    )
    assert (use.sent_bytes.tolist(), use.errors.tolist()) == ([2], [0])


def test_hosts_without_counters_or_clock_have_no_interfaces():
    counted = {"time_ns": S, "tx_bytes": 5}, {"time_ns": 2 * S, "tx_bytes": 7}
    assert interface_use([trace(2), network(*counted)], [clock(), NONE], TOPOLOGY).names == ()


def test_of_two_ranks_of_a_host_the_one_with_more_rows_counts():
    one = trace(1, network=rows("network", {"time_ns": S}, {"time_ns": 2 * S, "tx_bytes": 3}))
    use = interface_use([network({"time_ns": S}), one], [clock()] * 2, TOPOLOGY)
    assert use.names == (("n1", "eth0"), ("n1", "ib0")) and use.sent_bytes.tolist() == [3]
