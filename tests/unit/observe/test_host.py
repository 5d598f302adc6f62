from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hpcpace.observe.host.counters import HostCounters, Throttling
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
    assert row["rss_file_bytes"] == 300 * resource.getpagesize()
    assert row["sampler_wakeups"] > 0


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
    for name in ("involuntary_switches", "major_faults", "cpu_time_ns", "sampler_wakeups"):
        del row[name]
    assert set(row.values()) == {0}


def test_quotas_are_read_with_their_files_once_they_stop_the_process(proc: Path, tmp_path: Path) -> None:
    outer, inner = tmp_path / "cgroup" / "pod", tmp_path / "cgroup" / "pod" / "task"
    inner.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/pod/task\n")

    def set_counters(inner_us: int, outer_us: int, quota: str) -> None:
        (inner / "cpu.stat").write_text(f"usage_usec 9\nthrottled_usec {inner_us}\n")
        (outer / "cpu.stat").write_text(f"usage_usec 9\nthrottled_usec {outer_us}\n")
        (inner / "cpu.max").write_text("max 100000\n")
        (outer / "cpu.max").write_text(quota)

    set_counters(0, 700, "25000 100000\n")
    throttling = Throttling(proc=proc, cgroup=tmp_path / "cgroup")
    found = []
    # Stopped before; not stopped; by the quota of the cgroup above; again; by another quota; it is lifted; nonsense.
    steps = ((700, "25000"), (700, "25000"), (900, "25000"), (950, "25000"), (960, "50000"), (970, "max"), (980, "x"))
    for outer_us, quota in steps:
        set_counters(0, outer_us, f"{quota} 100000\n")
        found.append((throttling.read_ns(), [each.millicores for each in throttling.take_new()]))
    assert found == [
        (700_000, []), (700_000, []), (900_000, [250]), (950_000, []), (960_000, [500]), (970_000, []), (980_000, []),
    ]  # fmt: skip
    set_counters(5, 980, "30000 100000\n")
    throttling.read_ns()
    assert throttling.take_new() == []  # that of the process itself has no limit: somebody else changed it
