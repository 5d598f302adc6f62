"""Snapshots: what is in them, their size, and files that are cut off, old or foreign."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import (
    MAX_BYTES,
    differences,
    load_snapshots,
    read_attempt,
    save_snapshots,
    snapshot_from,
    snapshot_text,
)
from hpcpace.core.errors import SnapshotError, UsageError
from hpcpace.core.rundir import open_run
from tests.machines.cases import CASES, HEALTHY, Case, small_node
from tests.machines.machine import Machine, dgx_h100, threaded


@pytest.fixture
def snapshot(tree_path: Path) -> Snapshot:
    return take_tree(small_node("n1").write(tree_path))


@pytest.mark.parametrize("name", CASES)
def test_a_snapshot_survives_json(name: str, tree_path: Path) -> None:
    for snapshot in CASES[name].snapshots(tree_path):
        text = snapshot_text(snapshot)
        assert len(text) < MAX_BYTES
        read = snapshot_from(text)
        assert snapshot_text(read) == text
        assert (read.ranks, read.rdma, read.net, read.kernel) == (
            snapshot.ranks,
            snapshot.rdma,
            snapshot.net,
            snapshot.kernel,
        )


def test_192_ranks_of_256_cpus_and_the_devices_of_a_dgx_fit(tree_path: Path) -> None:
    machine = dgx_h100(ranks=False)
    for rank in range(192):
        environ = {f"NCCL_VARIABLE_{number}": "x" * 60 for number in range(20)}
        machine.rank(rank, str(rank), world=192, environ=environ)
    snapshot = take_tree(machine.write(tree_path))
    text = snapshot_text(snapshot)
    assert len(text) < MAX_BYTES
    assert snapshot_from(text).ranks == snapshot.ranks


def test_a_host_with_too_much_says_what_it_left_out(snapshot: Snapshot) -> None:
    pci = tuple(
        dataclasses.replace(snapshot.hardware.pci[0], address=f"0000:{bus:02x}:00.{function}")
        for bus in range(64)
        for function in range(4)
    )
    large = dataclasses.replace(snapshot, hardware=dataclasses.replace(snapshot.hardware, pci=pci))
    text = snapshot_text(large)
    assert len(text) < MAX_BYTES
    assert snapshot_from(text).unreadable["pci"] == "too many devices for a snapshot"


def test_reasons_are_kept_by_the_name_of_the_fact(tree_path: Path) -> None:
    machine = small_node("n1").without("sys/class/net/ens0/mtu")
    assert take_tree(machine.write(tree_path)).unreadable["net/ens0/mtu"] == "no such file or directory"


def test_secrets_of_the_environment_stay_out(tree_path: Path) -> None:
    machine = small_node("n1", ranks=0)
    machine.rank(0, "0", world=1, environ={"AWS_SECRET_ACCESS_KEY": "hunter2", "NCCL_DEBUG": "WARN"})
    text = snapshot_text(take_tree(machine.write(tree_path)))
    assert "hunter2" not in text
    assert "NCCL_DEBUG" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "not complete JSON"),
        (lambda text: "", "not complete JSON"),
        (lambda text: "[]", "its `schema` is missing"),
        (lambda text: "{}", "its `schema` is missing"),
        (lambda text: text.replace("snapshot/1", "snapshot/7"), "schema hpcpace-audit-snapshot/7"),
        (lambda text: text.replace('"mtu":9000', '"mtu":"9000"'), "mtu is '9000': expected an integer"),
        (lambda text: text.replace('"boot_id"', '"other"'), "has no 'boot_id'"),
        (lambda text: text.replace('"num":2', '"num":99999999'), "ranks"),
        (lambda text: text.replace('"num":2', '"num":3'), "ranks"),
        (lambda text: "[" * 100_000, "not complete JSON"),
        (lambda text: text.replace('"is_live":false', '"is_live":0'), "expected true or false"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_in_one_sentence(
    change: object, message: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    path = tmp_path / "n1.json"
    path.write_text(change(snapshot_text(snapshot)))
    with pytest.raises(UsageError, match=message):
        load_snapshots(tmp_path)


def test_a_folder_with_one_bad_snapshot_is_read_without_it(snapshot: Snapshot, tmp_path: Path) -> None:
    save_snapshots(tmp_path, [snapshot])
    (tmp_path / "n2.json").write_text(snapshot_text(snapshot)[:300])
    snapshots, problems = load_snapshots(tmp_path)
    assert [one.host for one in snapshots] == ["n1"]
    assert len(problems) == 1 and "n2.json" in problems[0]


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.mkdir(), "it is no regular file"),
        (lambda path: path.symlink_to("n1.json"), "symbolic link"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (_sparse, "it has more than 1048576 bytes"),
    ],
)
def test_what_is_no_file_is_left_out_and_named(
    make: Callable[[Path], object], reason: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    save_snapshots(tmp_path, [snapshot])
    make(tmp_path / "n2.json")
    snapshots, problems = load_snapshots(tmp_path)
    assert [one.host for one in snapshots] == ["n1"]
    assert len(problems) == 1 and problems[0].startswith(f"cannot read {tmp_path}/n2.json: ") and reason in problems[0]


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"mtu":9000', '"mtu":NaN', "NaN is not valid JSON"),
        ('"mtu":9000', '"mtu":-Infinity', "-Infinity is not valid JSON"),
        ('"mtu":9000', '"mtu":1e999', "mtu is inf: expected an integer"),
        ('"mtu":9000', '"mtu":' + "9" * 5000, "not complete JSON"),
        ('"mtu":9000', '"mtu":' + "9" * 4000, "expected an integer"),
        ('"mtu":9000', f'"mtu":{DEEP}', r"mtu is \[\[\["),
        ('"mtu":9000', '"mtu":9000,"mtu":1500', "an object has a name twice"),
        ('"host":"n1"', '"host":"n2","host":"n1"', "an object has a name twice"),
        ('"schema":"hpcpace-audit-snapshot/1"', f'"schema":{DEEP}', "its `schema` is missing"),
        ('"same":{', f'"same":{{"x":{DEEP},"rank":', "not complete JSON|expected"),
        ('"num":2,"same":{', '"num":4096,"same":{"x":[' + "0," * 40 + "0],", "shared values"),
        ('"each":{', '"each":{"x":{"num":2,"same":{},"each":{}},', r"ranks\.x is .* expected a list of 2"),
    ],
)
def test_a_hostile_snapshot_is_left_out_and_named(
    old: str, new: str, reason: str, snapshot: Snapshot, tmp_path: Path
) -> None:
    save_snapshots(tmp_path, [snapshot])
    text = snapshot_text(snapshot)
    assert old in text
    (tmp_path / "n2.json").write_text(text.replace(old, new, 1))
    snapshots, problems = load_snapshots(tmp_path)
    assert [one.host for one in snapshots] == ["n1"]
    (problem,) = problems
    assert problem.startswith(f"{tmp_path}/n2.json: ") and len(problem) < len(str(tmp_path)) + 250
    with pytest.raises(UsageError, match=reason):
        load_snapshots(tmp_path / "n2.json")


def test_snapshots_together_take_so_much_memory_and_no_more(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcpace.audit.snapshot_files._MAX_WEIGHT", 50_000)
    save_snapshots(tmp_path, [dataclasses.replace(snapshot, host=f"n{number}") for number in range(9)])
    snapshots, problems = load_snapshots(tmp_path)
    assert 1 < len(snapshots) < 9
    assert problems == [f"{9 - len(snapshots)} more files of {tmp_path} are left out: too much data"]


@pytest.mark.parametrize("name", ["attempt-0/snapshot", "attempt-0"])
def test_the_snapshots_of_a_run_are_not_read_through_a_link(name: str, snapshot: Snapshot, tmp_path: Path) -> None:
    save_snapshots(tmp_path / "other" / "snapshot", [snapshot])
    (tmp_path / "run" / "attempt-0").mkdir(parents=True)
    run = open_run(tmp_path / "run")
    attempt = run.attempts()[0]
    if name == "attempt-0":
        attempt.path.rmdir()
        attempt.path.symlink_to(tmp_path / "other")
    else:
        attempt.snapshot_dir.symlink_to(tmp_path / "other" / "snapshot")
    snapshots, (problem,) = read_attempt(attempt)
    assert snapshots == [] and "symbolic link" in problem


def test_a_snapshot_that_cannot_be_saved_keeps_no_other_from_it(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "n1.json").mkdir()
    large = dataclasses.replace(snapshot, host="n2", boot_id="x" * MAX_BYTES)
    with pytest.raises(SnapshotError, match=r"n1: Is a directory; the facts of n2 take"):
        save_snapshots(tmp_path, [snapshot, large, dataclasses.replace(snapshot, host="n3")])
    assert [one.host for one in load_snapshots(tmp_path)[0]] == ["n3"]


def test_unknown_fields_of_a_later_minor_version_are_ignored(snapshot: Snapshot) -> None:
    document = json.loads(snapshot_text(snapshot)) | {"temperature": 30}
    assert snapshot_from(json.dumps(document)).host == "n1"


def test_hosts_of_one_name_are_kept_apart(snapshot: Snapshot, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(snapshot_text(snapshot))
    assert [one.host for one in load_snapshots(tmp_path)[0]] == ["n1", "n1#2"]


def test_a_host_name_cannot_leave_the_folder(snapshot: Snapshot, tmp_path: Path) -> None:
    (path,) = save_snapshots(tmp_path / "out", [dataclasses.replace(snapshot, host="../../etc/x")])
    assert path.parent == tmp_path / "out"


@pytest.mark.parametrize("change", ["network", "firmware", "nothing"])
def test_differences_name_what_changed_and_nothing_else(change: str, tree_path: Path) -> None:
    before, after = small_node("n1"), small_node("n1")
    if change == "network":
        after.files["sys/class/net/ens0/mtu"] = "1500"
    if change == "firmware":
        after.files["sys/class/infiniband/mlx5_1/fw_ver"] = "28.40.1000"
    old, new = (take_tree(m.write(tree_path / str(n))) for n, m in enumerate((before, after)))
    found = [(d.name, d.before, d.after) for d in differences(old, new)]
    assert (
        found
        == {
            "network": [("net/ens0/mtu", "9000", "1500")],
            "firmware": [("rdma/mlx5_1/firmware", "28.39.1002", "28.40.1000")],
            "nothing": [],
        }[change]
    )


def test_cgroups_of_version_1_are_read(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 8)})
    machine.rank(0, "0-7", world=1, mems="0")
    machine.files["proc/1000/cgroup"] = "4:memory:/j\n3:cpuset:/j\n2:cpu,cpuacct:/j\n0::/\n"
    machine.files |= {
        "sys/fs/cgroup/cpu,cpuacct/j/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu,cpuacct/j/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuset/j/cpuset.effective_cpus": "0-3",
        "sys/fs/cgroup/memory/j/memory.limit_in_bytes": str(1 << 30),
    }
    (rank,) = take_tree(machine.write(tree_path)).ranks
    assert (rank.quota_cpus, rank.cgroup_cpus, rank.memory_max_bytes) == (2.0, "0-3", 1 << 30)


def test_the_smallest_quota_on_the_way_up_counts(tree_path: Path) -> None:
    machine = small_node("n1", ranks=1)
    machine.files["sys/fs/cgroup/job_17/cpu.max"] = "150000 100000"
    (rank,) = take_tree(machine.write(tree_path)).ranks
    assert rank.quota_cpus == 1.5


def test_virtual_functions_are_left_out_where_their_adapter_is_seen(tree_path: Path) -> None:
    machine = small_node("n1")
    machine.pci("pci0000:10/0000:10:02.0/0000:12:00.1", "0x020000", "0x15b3", "0x101e", numa=0)
    machine.links["sys/devices/pci0000:10/0000:10:02.0/0000:12:00.1/physfn"] = "../0000:12:00.0"
    devices = take_tree(machine.write(tree_path)).hardware.pci
    assert "0000:12:00.1" not in {device.address for device in devices or ()}


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_a_root_that_is_no_tree_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--sysfs-root takes"):
        take_tree(tmp_path / name if name == "file" else tmp_path)


def test_nothing_at_all_gives_a_snapshot_of_unknowns(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    snapshot = take_tree(tmp_path)
    assert snapshot.hardware.pci is None and snapshot.net is None
    assert Case(hosts=list).patched(snapshot) == snapshot


def test_snapshot_error_is_bad_input() -> None:
    assert SnapshotError("x").exit_code == 2


def _changed_by_itself(snapshot: Snapshot) -> Snapshot:
    numa = tuple(
        dataclasses.replace(node, memory_kb=(node.memory_kb or 0) - 9) for node in snapshot.hardware.numa or ()
    )
    pci = tuple(
        dataclasses.replace(device, speed_gts=2.5) if device.kind == "gpu" else device
        for device in snapshot.hardware.pci or ()
    )
    return dataclasses.replace(
        snapshot,
        boot_id="another",
        hardware=dataclasses.replace(snapshot.hardware, numa=numa, pci=pci),
        gpus=tuple(
            dataclasses.replace(gpu, nvml=dataclasses.replace(HEALTHY, utilization_percent=99, throttle_reasons=4))
            for gpu in snapshot.gpus or ()
        ),
        counters=dataclasses.replace(snapshot.counters, values={"net/ens0/rx_packets": 17}),
    )


def test_a_machine_that_nobody_changed_does_not_differ(snapshot: Snapshot) -> None:
    gpus = tuple(dataclasses.replace(gpu, nvml=HEALTHY) for gpu in snapshot.gpus or ())
    assert differences(dataclasses.replace(snapshot, gpus=gpus), _changed_by_itself(snapshot)) == []


def test_what_changes_by_itself_is_compared_on_request(snapshot: Snapshot) -> None:
    gpus = tuple(dataclasses.replace(gpu, nvml=HEALTHY) for gpu in snapshot.gpus or ())
    before = dataclasses.replace(snapshot, gpus=gpus)
    found = {d.name for d in differences(before, _changed_by_itself(snapshot), with_counters=True)}
    assert {"boot_id", "counters/values/net/ens0/rx_packets", "hardware/numa/0/memory_kb"} <= found
    assert {fact.split("/")[-1] for fact in found} >= {"speed_gts", "utilization_percent", "throttle_reasons"}


def test_a_memory_module_that_is_gone_is_a_difference(snapshot: Snapshot) -> None:
    (node,) = snapshot.hardware.numa or ()
    less = dataclasses.replace(node, memory_kb=(node.memory_kb or 0) * 15 // 16)
    after = dataclasses.replace(snapshot, hardware=dataclasses.replace(snapshot.hardware, numa=(less,)))
    assert [d.name for d in differences(snapshot, after)] == ["hardware/numa/0/memory_kb"]
