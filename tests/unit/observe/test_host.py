from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hpcpace.observe.host.counters import HostCounters
from hpcpace.trace.schema import TABLES

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin ActiveOpens RetransSegs OutRsts
Tcp: 1 200 17 42 3
"""
NET_DEV = "head\nhead\n eth0: 1 1 0 5 0 0 0 0 1 1 0 2 0 0 0 0\n"
COLUMNS = TABLES["host"].dtype.names


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self" / "net").mkdir(parents=True)
    (tmp_path / "self" / "statm").write_text("5000 700 300 1 0 400 0\n")
    (tmp_path / "self" / "net" / "snmp").write_text(SNMP)
    (tmp_path / "self" / "net" / "dev").write_text(NET_DEV)
    return tmp_path


def _read(proc: Path, cgroup: Path) -> dict[str, int]:
    assert COLUMNS is not None
    return dict(zip(COLUMNS[1:], HostCounters(proc=proc, cgroup=cgroup).read(), strict=True))


def test_reads_memory_retransmits_and_drops(proc: Path, tmp_path: Path) -> None:
    row = _read(proc, tmp_path / "cgroup")
    assert row["rss_bytes"] == 700 * resource.getpagesize()
    assert row["tcp_retransmits"] == 42
    assert row["nic_drops"] == 7


@pytest.mark.parametrize(
    ("membership", "folder", "content"),
    [
        ("0::/job/step\n", "job/step", "usage_usec 9\nthrottled_usec 1500\n"),
        ("4:cpu,cpuacct:/job\n1:memory:/\n", "cpu,cpuacct/job", "nr_throttled 3\nthrottled_time 1500000\n"),
        ("4:cpu,cpuacct:/job\n", "cpu/job", "throttled_time 1500000\n"),
    ],
)
def test_reads_throttled_time_of_both_cgroup_versions(
    proc: Path, tmp_path: Path, membership: str, folder: str, content: str
) -> None:
    (proc / "self" / "cgroup").write_text(membership)
    (tmp_path / "cgroup" / folder).mkdir(parents=True)
    (tmp_path / "cgroup" / folder / "cpu.stat").write_text(content)
    assert _read(proc, tmp_path / "cgroup")["cpu_throttled_ns"] == 1_500_000


def test_what_a_host_does_not_have_reads_as_zero(tmp_path: Path) -> None:
    row = _read(tmp_path, tmp_path)
    del row["involuntary_switches"], row["major_faults"], row["cpu_time_ns"]
    assert set(row.values()) == {0}
