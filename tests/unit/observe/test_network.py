from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.observe.host.network import Details, NetworkCounters, find_fabric_ports, find_network_counters
from hpcpace.trace.schema import LinkState

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame c m|bytes    packets errs drop fifo colls carrier compressed
    lo:     100      10    0    0    0     0     0  0      100      10    0    0    0     0       0          0
  eth0: 7000000     900    1    2    0     0     0  0  3000000     800    3    4    0     0       0          0
"""


def bytes_of(counters: NetworkCounters) -> list[tuple[int, ...]]:
    return [row[:3] for row in counters.read()]


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self" / "net").mkdir(parents=True)
    (proc / "self" / "net" / "dev").write_text(NET_DEV)
    counters = sys / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("250\n")
    (counters / "port_rcv_data").write_text("1000\n")
    return proc, sys


def test_names_network_devices_and_rdma_ports(host: tuple[Path, Path]) -> None:
    proc, sys = host
    assert find_network_counters(proc=proc, sys=sys).interfaces == ("eth0", "lo", "mlx5_0/1")


def test_reads_sent_and_received_bytes_and_counts_rdma_words_as_four_bytes(host: tuple[Path, Path]) -> None:
    proc, sys = host
    assert bytes_of(find_network_counters(proc=proc, sys=sys)) == [
        (0, 3000000, 7000000),
        (1, 100, 100),
        (2, 1000, 4000),
    ]


def test_an_interface_that_went_away_reads_as_zero(host: tuple[Path, Path]) -> None:
    proc, sys = host
    counters = find_network_counters(proc=proc, sys=sys)
    (proc / "self" / "net" / "dev").write_text(NET_DEV.replace("eth0", "eth1"))
    (sys / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").unlink()
    assert bytes_of(counters) == [(0, 0, 0), (1, 100, 100), (2, 0, 4000)]


@each_case("content", ["", "nonsense", "a\nb\nlo: 1 2\n"])
def test_a_strange_table_gives_no_interfaces(tmp_path: Path, content: str) -> None:
    (tmp_path / "self" / "net").mkdir(parents=True)
    (tmp_path / "self" / "net" / "dev").write_text(content)
    assert find_network_counters(proc=tmp_path, sys=tmp_path).interfaces == ()


def test_a_host_without_procfs_has_no_interfaces(tmp_path: Path) -> None:
    assert find_network_counters(proc=tmp_path / "proc", sys=tmp_path / "sys").read() == []


def test_errors_and_drops_of_both_directions_are_in_a_row(host: tuple[Path, Path]) -> None:
    proc, sys = host
    found = {row[0]: row[3:5] for row in find_network_counters(proc=proc, sys=sys).read()}
    assert (found[0], found[1]) == ((4, 6), (0, 0))


def test_one_interface_is_asked_for_details_at_a_time_and_lo_never(host: tuple[Path, Path]) -> None:
    proc, _ = host
    asked: list[str] = []

    def details(name: str) -> Details:
        asked.append(name)
        return Details(pauses=len(asked), link_downs=1, rate_bps=10**9, state=LinkState.UP)

    counters = NetworkCounters(("lo", "eth0", "eth1"), (), proc / "self" / "net" / "dev", details)
    rows = counters.read()
    assert rows[1][3:] == (4, 6, 1, 0, 0, 0, 1, 10**9, LinkState.UP)
    assert rows[2][3:] == (*(0,) * 8, LinkState.UNKNOWN)
    assert [row[5] for row in counters.read()] == [0, 1, 2]
    assert [row[5] for row in counters.read()] == [0, 3, 2]
    assert asked == ["eth0", "eth1", "eth0"]


def test_interfaces_beyond_what_the_trace_can_number_are_left_out(host: tuple[Path, Path]) -> None:
    proc, sys = host
    names = tuple(f"veth{number}" for number in range(300))
    counters = NetworkCounters(names, find_fabric_ports(sys), proc / "self" / "net" / "dev", lambda name: Details())
    assert (len(counters.interfaces), len(counters.read())) == (256, 256)
