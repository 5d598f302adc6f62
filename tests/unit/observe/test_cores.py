from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.observe.host.counters import CoreCounters, usable_cpus

PRESSURE = "some avg10=55.57 avg60=18.51 avg300=4.80 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self" / "task").mkdir(parents=True)
    (tmp_path / "proc" / "pressure").mkdir()
    return tmp_path / "proc"


def counters(proc: Path) -> CoreCounters:
    return CoreCounters(proc=proc, cgroup=proc.parent / "cgroup")


def thread(proc: Path, number: int, content: str) -> None:
    folder = proc / "self" / "task" / str(number)
    folder.mkdir(exist_ok=True)
    (folder / "schedstat").write_text(content)


def cgroup(proc: Path, membership: str, folder: str, content: str) -> None:
    (proc / "self" / "cgroup").write_text(membership)
    (proc.parent / "cgroup" / folder).mkdir(parents=True)
    (proc.parent / "cgroup" / folder / "cpu.pressure").write_text(content)


def test_the_run_queue_wait_is_summed_over_the_threads(proc):
    thread(proc, 7, "5000 300 4\n")
    thread(proc, 8, "100 40 2\n")
    assert counters(proc).read()[1] == 340


def test_the_wait_of_a_thread_that_has_ended_is_kept(proc):
    thread(proc, 7, "5000 300 4\n")
    thread(proc, 8, "100 40 2\n")
    read = counters(proc)
    read.read()
    (proc / "self" / "task" / "8" / "schedstat").unlink()
    (proc / "self" / "task" / "8").rmdir()
    thread(proc, 7, "5000 310 4\n")
    assert read.read()[1] == 350


def test_of_many_threads_all_are_read_in_turn(proc):
    for number in range(100, 300):
        thread(proc, number, "1 10 1\n")
    read = counters(proc)
    found = [read.read()[1] for _ in range(6)]
    assert found[0] == 64 * 10
    assert found[-1] == 200 * 10
    assert found == sorted(found)


@pytest.mark.parametrize("content", ["", "12", "1 -4 2", "one two three", f"1 {'9' * 40} 2", "\0\0"])
def test_a_wait_that_says_nothing_sensible_counts_as_none(proc, content):
    thread(proc, 7, content)
    assert counters(proc).read()[1] == 0


@pytest.mark.parametrize("folder", ["job/step", "unified/job/step"])
def test_the_pressure_is_that_of_the_cgroup(proc, folder):
    cgroup(proc, "4:cpu:/other\n0::/job/step\n", folder, PRESSURE.format(some=12))
    (proc / "pressure" / "cpu").write_text(PRESSURE.format(some=99))
    assert counters(proc).read()[2] == 12_000


def test_the_pressure_is_that_of_the_host_where_the_cgroup_tells_none(proc):
    cgroup(proc, "0::/job\n", "job", "")
    (proc / "pressure" / "cpu").write_text(PRESSURE.format(some=99))
    assert counters(proc).read()[2] == 99_000


@pytest.mark.parametrize(
    "content",
    ["", "full avg10=0.00 total=5\n", "some total=-5\n", "some avg10=1 total=lots\n", f"some total={'9' * 30}\n", "\0"],
)
def test_a_pressure_that_says_nothing_sensible_counts_as_none(proc, content):
    (proc / "pressure" / "cpu").write_text(content)
    assert counters(proc).read()[2] == 0


def test_without_procfs_only_the_processor_time_is_known(tmp_path):
    running_ns, wait_ns, pressure_ns = CoreCounters(proc=tmp_path / "no", cgroup=tmp_path / "none").read()
    assert running_ns > 0
    assert (wait_ns, pressure_ns) == (0, 0)


def test_a_pressure_that_cannot_be_read_any_more_counts_as_none(proc):
    (proc / "pressure" / "cpu").write_text(PRESSURE.format(some=99))
    read = counters(proc)
    (proc / "pressure" / "cpu").unlink()
    assert read.read()[2] == 0


@pytest.mark.parametrize("membership", ["0::/../..\n", "nonsense\n", "0:\n", "\xff\xfe::\n"])
def test_a_membership_that_leads_nowhere_leaves_the_pressure_of_the_host(proc, membership):
    (proc / "self" / "cgroup").write_bytes(membership.encode("latin-1"))
    (proc / "pressure" / "cpu").write_text(PRESSURE.format(some=99))
    assert counters(proc).read()[2] == 99_000


@pytest.mark.parametrize(
    ("status", "cpus"),
    [
        ("Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1,8\nMems_allowed_list:\t0\n", "0-1,8"),
        ("Name:\tCpus_allowed_list:\t0\n", ""),
        ("Cpus_allowed_list:\tmany\n", ""),
        ("", ""),
    ],
)
def test_the_cpus_of_a_process_are_those_that_the_kernel_lists(proc, status, cpus):
    (proc / "self" / "status").write_text(status)
    assert usable_cpus(proc) == cpus
