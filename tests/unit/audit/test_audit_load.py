"""Load, memory, swap and clock: what two readings of /proc say, whose processes they are, and which rules see it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hpcpace.audit.collect_host import LoadReading, collect_load, collect_memory, collect_time_sync, is_busy, read_load
from hpcpace.audit.facts import Load, OtherProcesses, TimeSync
from hpcpace.audit.findings import AuditFinding
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import run_rules
from hpcpace.audit.snapshot_files import snapshot_from, snapshot_text
from hpcpace.audit.tree import Tree
from tests.machines.cases import CROWDED, QUIET, QUIET_LOAD, QUIET_MEMORY, Case, small_node

RULES = ("S07", "S08", "S09", "S10")
TICKS = os.sysconf("SC_CLK_TCK")


class Proc:
    """A /proc that a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("loadavg", "30.05 20.00 10.00 31/400 999")
        self.put("vmstat", "pswpin 10\npswpout 20\n")
        self.put("pressure/cpu", "some avg10=87.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00\n")
        self.total(0)

    def put(self, name: str, text: str) -> None:
        path = self.root / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def total(self, seconds: float) -> None:
        self.put("stat", f"cpu  {int(seconds * TICKS)} 0 0 500 0 0 0 0 0 0\ncpu0 1 2 3\n")

    def process(
        self, pid: int, seconds: float, *, name: str = "python", parent: int = 1, state: str = "R", start: int = 5
    ) -> None:
        ticks = int(seconds * TICKS)
        self.put(
            f"{pid}/stat", f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {start} 0 0\n"
        )
        self.put(f"{pid}/status", "Name:\tx\nCpus_allowed_list:\t0-1\n")

    def reading(self, time_s: float) -> LoadReading:
        return dataclasses.replace(read_load(Tree(self.root), with_processes=True), time_s=time_s)

    def load(self, before: LoadReading, after: LoadReading, **environ: str) -> Load:
        found = collect_load(Tree(self.root), before, after, environ, has_siblings=False)
        assert found is not None
        return found


def test_cpu_time_is_that_of_the_window_by_user_and_name(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.put("../etc/passwd", f"ann:x:{os.getuid()}:0::/:/bin/sh\n")
    proc.process(100, 50.0, name="a) (b")
    proc.process(101, 50.0, name="a) (b")
    proc.process(102, 9.0, start=5)
    before = proc.reading(10.0)
    proc.process(100, 50.5, name="a) (b")
    proc.process(101, 50.25, name="a) (b")
    proc.process(102, 0.5, start=900)  # another process with its number
    proc.process(103, 0.02)
    proc.process(3, 1.0, name="kworker/0:1", parent=2)
    proc.total(2.25)
    load = proc.load(before, proc.reading(11.0))
    assert [(o.user, o.name, o.count, o.used_cpus, o.cpus) for o in load.others or ()] == [
        ("ann", "a) (b", 2, 0.75, "0-1"),
        ("ann", "python", 2, 0.52, "0-1"),
    ]
    assert (load.used_cpus, load.job_cpus, load.averages, load.pressure["cpu some"]) == (
        2.25,
        0.0,
        (30.05, 20, 10),
        87.5,
    )


def test_the_processes_of_the_job_are_not_others(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    me = os.getpid()
    numbers = {
        "ancestor": 50,
        "child": 60,
        "grandchild": 61,
        "by its cgroup": 70,
        "by its environment": 71,
        "other": 72,
    }
    parents = {"child": me, "grandchild": 60}
    for seconds in (0.0, 0.5):
        proc.process(me, seconds, parent=50)
        for name, pid in numbers.items():
            proc.process(pid, seconds, name=name[:15], parent=parents.get(name, 1))
        proc.put("70/cgroup", "0::/system.slice/slurmstepd.scope/job_17/step_0\n")
        proc.put("72/cgroup", "0::/system.slice/slurmstepd.scope/job_177/step_0\n")
        proc.put("71/environ", "A=1\0SLURM_JOB_ID=17\0")
        if not seconds:
            before = proc.reading(1.0)
    load = proc.load(before, proc.reading(2.0), SLURM_JOB_ID="17")
    assert [o.name for o in load.others or ()] == ["other"] and load.job_cpus == 3.0


def test_a_node_without_load_or_with_damaged_files_says_so(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    shutil.rmtree(tmp_path / "proc" / "pressure")
    proc.put("stat", "cpu broken")
    proc.put("77/stat", "77 (x")
    proc.put("78/stat", "")
    load = proc.load(proc.reading(1.0), proc.reading(2.0))
    assert (load.used_cpus, load.pressure, load.others) == (None, {}, ())
    tree = Tree(tmp_path)
    proc.put("loadavg", "x y z")
    assert collect_load(tree, None, None, {}, has_siblings=False) is None and "load" in tree.unreadable
    assert not is_busy(tree) and is_busy(Tree()) in (True, False)


def test_swap_is_what_moved_in_the_window(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.put("meminfo", "MemTotal: 100 kB\nMemAvailable: 40 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nHugePages_Free: 2\n")
    before = proc.reading(1.0)
    proc.put("vmstat", "pswpin 12\npswpout 25\n")
    memory = collect_memory(Tree(tmp_path), before, proc.reading(2.0))
    assert memory is not None and memory.swapped_bytes == 7 * os.sysconf("SC_PAGE_SIZE")
    assert (memory.total_bytes, memory.swap_free_bytes, memory.overcommit) == (102_400, 20_480, None)


def test_this_machine_is_read_without_waiting_long() -> None:
    tree, begin_s = Tree(), time.monotonic()
    first = read_load(tree, with_processes=True)
    load = collect_load(tree, first, read_load(tree, with_processes=True), {}, has_siblings=False)
    clock = collect_time_sync(tree)
    assert load is not None and load.averages and collect_memory(tree, None, None) is not None
    assert (clock is not None or "time_sync" in tree.unreadable) and time.monotonic() - begin_s < 30


def _found(tmp_path: Path, *, ranks: int = 2, **facts: object) -> list[AuditFinding]:
    case = Case(hosts=lambda: [small_node("n1", ranks=ranks)], facts=QUIET | facts)
    return list(run_rules(AuditedJob(case.snapshots(tmp_path)), RULES).findings)


def test_what_the_job_does_itself_is_no_finding(tmp_path: Path) -> None:
    own = dataclasses.replace(QUIET_LOAD, averages=(64.0, 60.0, 60.0), used_cpus=16.0, job_cpus=15.9)
    assert _found(tmp_path / "all", load=own) == []
    elsewhere = OtherProcesses(user="ann", name="python", count=8, used_cpus=8.0, cpus="8-15")
    shared = dataclasses.replace(QUIET_LOAD, used_cpus=15.9, job_cpus=7.9, others=(elsewhere,))
    assert _found(tmp_path / "part", ranks=1, load=shared) == []


def test_each_fault_of_a_crowded_node_is_found_with_its_numbers(tmp_path: Path) -> None:
    found = _found(tmp_path, **CROWDED)
    seen = {f"{f.severity} {f.rule}: {f.seen}" for f in found}
    for text in (
        "W S07: processes outside the job use 7.9 of 16 CPUs (in 1 s): 6 python of ann 6.0, 1 make of ben 1.2",
        "W S07: the hypervisor gave 0.4 of 16 CPUs",
        "W S07: 9 processes outside the job wait for I/O",
        "W S08: 6 python of ann, not of this job, use 6.0 CPUs (in 1 s)",
        "W S09: swaps 5",
        "W S09: only 2",
        "W S10: the clock is not synchronised",
    ):
        assert any(line.startswith(text) for line in seen), (text, seen)
    (stray,) = [f for f in found if f.rule == "S08"]
    assert (stray.place, stray.ranks, len(found)) == ("CPUs 0-7", (0,), 7)


@pytest.mark.parametrize(
    ("facts", "letters"),
    [
        ({"load": dataclasses.replace(QUIET_LOAD, window_s=0.0, averages=(30.0, 1.0, 1.0), others=None)}, "I"),
        ({"memory": dataclasses.replace(QUIET_MEMORY, swap_free_bytes=0)}, "I"),
        ({"memory": dataclasses.replace(QUIET_MEMORY, huge_free_bytes=20 << 30)}, "I"),
        ({"memory": dataclasses.replace(QUIET_MEMORY, overcommit=2)}, "W"),
        ({"load": dataclasses.replace(QUIET_LOAD, pressure={"memory full": 12.0})}, "W"),
        ({"time_sync": TimeSync(is_synchronised=False, error_s=16.0, max_error_s=16.0, daemons=("chronyd",))}, "U"),
        ({"time_sync": TimeSync(is_synchronised=True, error_s=0.5, max_error_s=1.0, daemons=())}, "W"),
        ({"load": None, "memory": None, "time_sync": None}, ""),
    ],
)
def test_what_is_less_certain_is_said_as_such(facts: dict[str, object], letters: str, tmp_path: Path) -> None:
    assert "".join(f.severity for f in _found(tmp_path, **facts)) == letters


def test_a_snapshot_keeps_the_load_and_an_older_one_lacks_it(tmp_path: Path) -> None:
    (snapshot,) = Case(hosts=lambda: [small_node("n1")], facts=CROWDED).snapshots(tmp_path)
    text = snapshot_text(snapshot)
    read = snapshot_from(text)
    assert (read.load, read.memory, read.time_sync) == (snapshot.load, snapshot.memory, snapshot.time_sync)
    document = json.loads(text)
    for name in ("load", "memory", "time_sync"):
        del document[name]
    assert snapshot_from(json.dumps(document)).load is None
