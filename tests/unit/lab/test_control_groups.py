"""Where control groups are, and what is written into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab import hosts
from hpcpace.lab.hosts import HostCgroup, remove_cgroups, thaw_all, weigh_hosts

_V1 = """\
proc /proc proc rw 0 0
tmpfs /sys/fs/cgroup tmpfs rw,relatime,mode=755 0 0
cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,nosuid,freezer 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0
"""
_V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate 0 0\nproc /proc proc rw 0 0\n"
_HYBRID = _V1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n"
_HYBRID_WITHOUT_FREEZER = "".join(line for line in _HYBRID.splitlines(True) if "freezer" not in line)


@each_case(
    ("mounts", "cpu", "freezer"),
    [
        (_V1, ("/sys/fs/cgroup/cpu,cpuacct", False), ("/sys/fs/cgroup/freezer", False)),
        (_V2, ("/sys/fs/cgroup", True), ("/sys/fs/cgroup", True)),
        (_HYBRID, ("/sys/fs/cgroup/cpu,cpuacct", False), ("/sys/fs/cgroup/freezer", False)),
        (_HYBRID_WITHOUT_FREEZER, ("/sys/fs/cgroup/cpu,cpuacct", False), ("/sys/fs/cgroup/unified", True)),
        ("proc /proc proc rw 0 0\n", None, None),
        ("", None, None),
    ],
    ids=["v1", "v2", "hybrid", "hybrid without freezer", "none", "empty"],
)
def test_finds_the_tree_of_each_controller(tmp_path, mounts, cpu, freezer):
    (tmp_path / "mounts").write_text(mounts)
    expected = {"cpu": cpu, "freezer": freezer}
    assert hosts._trees(tmp_path / "mounts") == {
        name: (Path(tree[0]), tree[1]) for name, tree in expected.items() if tree is not None
    }


@pytest.fixture
def trees(monkeypatch, tmp_path):
    """Put plain folders in the place of the machine's trees; return a function that says which kind they are."""

    def use(*, v2: bool) -> HostCgroup:
        where = {"cpu": tmp_path, "freezer": tmp_path} if v2 else {n: tmp_path / n for n in ("cpu", "freezer")}
        monkeypatch.setattr(hosts, "_trees", lambda: {name: (tree, v2) for name, tree in where.items()})
        group = HostCgroup("test", "n1")
        for folder in group.paths():
            folder.mkdir(parents=True)
        return group

    return use


@pytest.mark.parametrize(("cores", "quota_us"), [(0.25, "2500"), (2.0, "20000"), (0.001, "1000"), (None, "-1")])
def test_limits_processor_time_in_v1(tmp_path, trees, cores, quota_us):
    trees(v2=False).limit_cpu(cores)
    folder = tmp_path / "cpu" / "hpcpace-lab-test" / "n1"
    assert (folder / "cpu.cfs_period_us").read_text() == "10000"
    assert (folder / "cpu.cfs_quota_us").read_text() == quota_us


@pytest.mark.parametrize(("cores", "limit"), [(0.25, "2500 10000"), (None, "max 10000")])
def test_limits_processor_time_in_v2(tmp_path, trees, cores, limit):
    trees(v2=True).limit_cpu(cores)
    assert (tmp_path / "hpcpace-lab-test" / "n1" / "cpu.max").read_text() == limit


@pytest.mark.parametrize(
    ("v2", "file", "words"),
    [
        (False, "freezer/hpcpace-lab-test/n1/freezer.state", ("FROZEN", "THAWED")),
        (True, "hpcpace-lab-test/n1/cgroup.freeze", ("1", "0")),
    ],
)
def test_freezes_and_thaws(tmp_path, trees, v2, file, words):
    group = trees(v2=v2)
    group.freeze(True)
    assert (tmp_path / file).read_text() == words[0]
    group.freeze(False)
    assert (tmp_path / file).read_text() == words[1]


@pytest.mark.parametrize(
    ("v2", "num_hosts", "file", "weight"),
    [
        (False, 8, "cpu/hpcpace-lab-test/cpu.shares", "8192"),
        (False, 250, "cpu/hpcpace-lab-test/cpu.shares", "256000"),
        (True, 8, "hpcpace-lab-test/cpu.weight", "800"),
        (True, 250, "hpcpace-lab-test/cpu.weight", "10000"),
    ],
)
def test_a_lab_weighs_as_much_as_its_hosts(tmp_path, trees, v2, num_hosts, file, weight):
    trees(v2=v2)
    weigh_hosts("test", num_hosts)
    assert (tmp_path / file).read_text() == weight


def test_a_frozen_host_is_thawed_before_its_lab_ends(tmp_path, trees):
    trees(v2=False).freeze(True)
    thaw_all("test")
    assert (tmp_path / "freezer" / "hpcpace-lab-test" / "n1" / "freezer.state").read_text() == "THAWED"


@pytest.mark.parametrize("v2", [False, True])
def test_removes_the_groups_of_one_lab_and_no_other(tmp_path, trees, v2):
    trees(v2=v2)
    other = tmp_path / ("" if v2 else "cpu") / "hpcpace-lab-test2"
    other.mkdir()
    remove_cgroups("test")
    assert list(tmp_path.rglob("hpcpace-lab-*")) == [other]


@pytest.mark.parametrize(
    ("act", "purpose", "controller"),
    [
        (lambda group: group.limit_cpu(1.0), "limit CPU time", "cpu"),
        (lambda group: group.freeze(True), "freeze processes", "freezer"),
    ],
)
def test_a_machine_without_the_controller_is_named_as_the_reason(monkeypatch, act, purpose, controller):
    monkeypatch.setattr(hosts, "_trees", dict)
    with pytest.raises(HpcpaceError) as caught:
        act(HostCgroup("test", "n1"))
    assert str(caught.value) == (
        f"cannot {purpose}: this machine mounts no cgroup tree with the {controller} controller"
    )
