from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.observe.network import find_network_counters

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame c m|bytes    packets errs drop fifo colls carrier compressed
    lo:     100      10    0    0    0     0     0  0      100      10    0    0    0     0       0          0
  eth0: 7000000     900    0    0    0     0     0  0  3000000     800    0    0    0     0       0          0
"""


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
    assert find_network_counters(proc=proc, sys=sys).read() == [(0, 3000000, 7000000), (1, 100, 100), (2, 1000, 4000)]


def test_an_interface_that_went_away_reads_as_zero(host: tuple[Path, Path]) -> None:
    proc, sys = host
    counters = find_network_counters(proc=proc, sys=sys)
    (proc / "self" / "net" / "dev").write_text(NET_DEV.replace("eth0", "eth1"))
    (sys / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").unlink()
    assert counters.read() == [(0, 0, 0), (1, 100, 100), (2, 0, 4000)]


@pytest.mark.parametrize("content", ["", "nonsense", "a\nb\nlo: 1 2\n"])
def test_a_strange_table_gives_no_interfaces(tmp_path: Path, content: str) -> None:
    (tmp_path / "self" / "net").mkdir(parents=True)
    (tmp_path / "self" / "net" / "dev").write_text(content)
    assert find_network_counters(proc=tmp_path, sys=tmp_path).interfaces == ()


def test_a_host_without_procfs_has_no_interfaces(tmp_path: Path) -> None:
    assert find_network_counters(proc=tmp_path / "proc", sys=tmp_path / "sys").read() == []
