"""Every rule fires on some machine, is silent on some machine, and says U where its fact cannot be read."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.findings import AuditFinding, Severity
from hpcpace.audit.job import AuditedJob, read_topo
from hpcpace.audit.nccl_log import NcclLog
from hpcpace.audit.rulebook import BY_ID, RuleRun, run_rules
from hpcpace.audit.rules.network import hca_selects
from hpcpace.audit.settings import AuditConfig
from hpcpace.core.errors import UsageError
from tests.machines.cases import CASES, HEALTHY, LOGS, QUIET_LOAD, Case, cgroup_cut, siblings_shared, small_node
from tests.machines.machine import CX7, GPU, H100, IB_NIC, MELLANOX, NVIDIA, Machine, dgx_h100, memory_folder, threaded


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, RuleRun]]:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        made = {}
        for name, case in CASES.items():
            snapshots = case.snapshots(Path(folder) / name)
            made[name] = run_rules(AuditedJob(snapshots, case.settings, case.log, case.topo))
        yield made


@pytest.mark.parametrize("rule", BY_ID)
def test_rule_fires_on_some_machine(rule: str, runs: dict[str, RuleRun]) -> None:
    found = [f for run in runs.values() for f in run.findings if f.rule == rule and f.severity != Severity.UNKNOWN]
    assert found


@pytest.mark.parametrize("rule", BY_ID)
def test_rule_looks_at_some_machine_and_is_silent(rule: str, runs: dict[str, RuleRun]) -> None:
    silent = [
        name
        for name, run in runs.items()
        if rule not in run.skipped and not any(finding.rule == rule for finding in run.findings)
    ]
    assert silent


@pytest.mark.parametrize("rule", BY_ID.values(), ids=lambda rule: rule.id)
def test_severities_of_a_rule_are_those_that_its_explanation_names(rule: object, runs: dict[str, RuleRun]) -> None:
    seen = {f.severity for run in runs.values() for f in run.findings if f.rule == rule.id}
    assert seen <= {*rule.severities, "U"}


def _damaged(make: Callable[[], Machine], *removed: str, **files: str | bytes) -> Callable[[], list[Machine]]:
    def hosts() -> list[Machine]:
        machine = make().without(*removed)
        machine.files.update(files)
        return [machine]

    return hosts


def _variable(machine: Machine, name: str, value: str) -> Machine:
    machine.files["proc/1000/environ"] = f"{machine.files['proc/1000/environ']}{name}={value}\0"
    return machine


def _small() -> Machine:
    return small_node("n1")


def _two_kernels() -> list[Machine]:
    return [small_node("n1"), small_node("n2").without("proc/sys/kernel/osrelease")]


def _half_a_topology() -> list[Machine]:
    return [_variable(small_node("n1"), "SLURM_TOPOLOGY_ADDR", "top.leaf.n1"), small_node("n2")]


def _bound_without_mask() -> list[Machine]:
    return [_variable(_small(), "OMP_PROC_BIND", "close").without("proc/1000/status")]


def _no_iommu_groups() -> list[Machine]:
    machine = dgx_h100()
    machine.links = {path: to for path, to in machine.links.items() if not path.endswith("iommu_group")}
    return [machine]


def _without_net_named() -> list[Machine]:
    return [_variable(_small(), "NCCL_SOCKET_IFNAME", "ens0").without("sys/class/net")]


def _gid_without_rdma() -> list[Machine]:
    machine = _variable(_small(), "NCCL_IB_GID_INDEX", "3").without("sys/class/infiniband")
    machine.files["sys/class/infiniband"] = "not a folder"
    return [machine]


def _bad_conf() -> list[Machine]:
    machine = _small()
    machine.files["etc/nccl.conf"] = b"NCCL_ALGO=\xff\xfe\n"
    return [machine]


_DGX_GPU = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0"
_GPU_PLACE = "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0"
_NO_GPUS = ("sys/bus/pci", "proc/driver")
UNREADABLE: dict[str, Case] = {
    "A01": Case(hosts=lambda: [_small()], mpi_size=-1),
    "H01": Case(hosts=_two_kernels),
    "A02": Case(hosts=_damaged(_small, "proc/1000/status")),
    "A03": Case(hosts=_damaged(_small, "proc/1000/status")),
    "A04": Case(hosts=_damaged(_small, "proc/1000/status")),
    "A05": Case(hosts=_damaged(_small, "proc/1000/status")),
    "A06": Case(hosts=_damaged(_small, **{"sys/fs/cgroup/job_17/step_0/task_0/cpu.max": ""})),
    "A07": Case(hosts=_damaged(cgroup_cut, "proc/1000/status")),
    "A08": Case(hosts=_damaged(_small, *_NO_GPUS)),
    "A09": Case(hosts=_damaged(_small, *_NO_GPUS)),
    "A10": Case(hosts=_bound_without_mask),
    "N01": Case(hosts=_damaged(_small, "sys/bus/pci")),
    "N02": Case(hosts=_damaged(_small, "sys/bus/pci")),
    "N03": Case(hosts=_without_net_named),
    "N04": Case(hosts=_damaged(_small, "proc/1000/limits")),
    "N05": Case(hosts=_damaged(_small, "sys/class/infiniband/mlx5_0/ports/1/state")),
    "N06": Case(hosts=_damaged(_small, "sys/class/net/ens0/mtu")),
    "N07": Case(hosts=_gid_without_rdma),
    "N08": Case(hosts=_damaged(_small, "sys/class/infiniband/mlx5_0/ports/1/counters")),
    "N09": Case(hosts=_damaged(_small, "sys/module")),
    "P01": Case(hosts=_damaged(_small, f"{_GPU_PLACE}/current_link_width")),
    "P02": Case(hosts=_damaged(_small, f"{_GPU_PLACE}/current_link_speed")),
    "P03": Case(hosts=_damaged(_small, f"{_GPU_PLACE}/max_link_width")),
    "P04": Case(hosts=_damaged(_small, f"{_GPU_PLACE}/aer_dev_correctable")),
    "P05": Case(hosts=_no_iommu_groups),
    "P06": Case(hosts=_damaged(dgx_h100, f"{_DGX_GPU}/numa", f"{_DGX_GPU}/local_cpu")),
    "P07": Case(hosts=lambda: [_small()]),
    "P08": Case(hosts=lambda: [_small()]),
    "P09": Case(hosts=_damaged(_small, "proc/1000/status"), topo=read_topo(LOGS.parent / "topo" / "faults.txt")),
    "S01": Case(hosts=_damaged(_small, "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor")),
    "S02": Case(hosts=_damaged(_small, **{"proc/sys/kernel/numa_balancing": "many"})),
    "S03": Case(hosts=_damaged(_small, "sys/kernel/mm/transparent_hugepage/enabled")),
    "S04": Case(hosts=_damaged(_small, "proc/1000/status")),
    "S05": Case(hosts=_damaged(siblings_shared, "sys/devices/system/cpu/cpu3/topology/thread_siblings_list")),
    "S06": Case(hosts=_damaged(_small, "proc/1000/limits")),
    "S07": Case(hosts=_damaged(_small, **{"proc/loadavg": "much"})),
    "S08": Case(
        hosts=lambda: [_small()],
        facts={"load": dataclasses.replace(QUIET_LOAD, others=None), "unreadable": {"load/processes": "too many"}},
    ),
    "S09": Case(hosts=_damaged(_small, **{"proc/meminfo": "MemAvailable: much kB"})),
    "S10": Case(hosts=lambda: [_small()], facts={"unreadable": {"time_sync": "adjtimex: not permitted"}}),
    "C01": Case(hosts=_bad_conf),
    "C02": Case(hosts=lambda: [_small()], log=NcclLog(edges=frozenset({(0, 9, "P2P/CUMEM")}))),
    **{rule: Case(hosts=list, log=NcclLog(edges=frozenset(), has_info=False)) for rule in ("C03", "C04", "C05", "C07")},
    "C06": Case(hosts=list, log=NcclLog(edges=frozenset(), problems=("cannot read the log",))),
    "H02": Case(hosts=_half_a_topology),
}


def test_every_rule_has_a_machine_whose_fact_cannot_be_read() -> None:
    assert set(UNREADABLE) == set(BY_ID), "each rule needs a machine in UNREADABLE that lacks a fact of it"


@pytest.mark.parametrize("rule", UNREADABLE)
def test_rule_says_u_where_its_fact_cannot_be_read(rule: str, tree_path: Path) -> None:
    case = UNREADABLE[rule]
    run = run_rules(AuditedJob(case.snapshots(tree_path), case.settings, case.log, case.topo), [rule])
    assert Severity.UNKNOWN in {finding.severity for finding in run.findings}


def _found(machine: Machine, rule: str, folder: Path, **case: object) -> list[AuditFinding]:
    one = Case(hosts=lambda: [machine], **{"default_nvml": HEALTHY, **case})
    return list(run_rules(AuditedJob(one.snapshots(folder), one.settings, one.log, one.topo), [rule]).findings)


def test_more_gpus_on_an_adapter_than_need_be_are_counted(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 8)})
    for number in range(4):
        root = "10" if number < 3 else "20"
        gpu = f"0000:{root}:1{number}.0/0000:{0x30 + number:02x}:00.0"
        machine.pci(f"pci0000:{root}/0000:{root}:00.0/0000:{root}:01.0/{gpu}", GPU, NVIDIA, H100, numa=0, cpus="0-7")
    for number, root in enumerate(("10", "20")):
        nic = f"0000:{0x40 + number:02x}:00.0"
        machine.pci(
            f"pci0000:{root}/0000:{root}:00.0/0000:{root}:01.0/0000:{root}:1f.0/{nic}", IB_NIC, MELLANOX, CX7, numa=0
        )
        machine.rdma(f"mlx5_{number}", nic)
    (finding,) = _found(machine, "N02", tree_path)
    assert (finding.place, finding.severity) == ("mlx5_0 port 1", "W")
    assert finding.seen.startswith("3 GPUs map to it; spread evenly over 2 ports it would be 2 each")


def test_ranks_that_are_not_bound_at_all_do_not_overlap(tree_path: Path) -> None:
    machine = small_node("n1", ranks=0)
    for rank in range(2):
        machine.rank(rank, "0-15", world=2, mems="0")
    assert _found(machine, "A04", tree_path) == []


def test_two_ranks_on_one_gpu_over_mps_are_no_fault(tree_path: Path) -> None:
    machine = small_node("n1", ranks=0)
    for rank in range(2):
        environ = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}
        machine.rank(rank, f"{rank}-{rank}", world=2, mems="0", environ=environ)
    shared = [finding for finding in _found(machine, "A08", tree_path) if finding.place.startswith("GPU")]
    assert [finding.severity for finding in shared] == ["I"]


def _bound(cpus: str, environ: dict[str, str], folder: Path, *, cgroup: str = "") -> list[AuditFinding]:
    machine = Machine("n1").processors({0: threaded(0, 8), 1: threaded(8, 8)}, packages={0: [0], 1: [1]})
    return _found(machine.rank(0, cpus, world=1, environ=environ, cgroup=cgroup), "A10", folder)


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        *(
            ({"OMP_PROC_BIND": policy}, "unset OMP_PROC_BIND  # or export OMP_PROC_BIND=false")
            for policy in ("true", "close", "spread", "master", "primary", "TRUE", "spread,close")
        ),
        ({"OMP_PLACES": "cores"}, "unset OMP_PLACES  # or export OMP_PROC_BIND=false"),
        ({"GOMP_CPU_AFFINITY": "0-15"}, "unset GOMP_CPU_AFFINITY  # or export OMP_PROC_BIND=false"),
        *(
            ({"KMP_AFFINITY": value}, "unset KMP_AFFINITY  # or export KMP_AFFINITY=none")
            for value in ("granularity=fine,compact,1,0", "verbose,Scatter", "explicit,proclist=[0,2]")
        ),
        (
            {"OMP_PROC_BIND": "close", "OMP_PLACES": "{0},{1}"},
            "unset OMP_PROC_BIND OMP_PLACES  # or export OMP_PROC_BIND=false",
        ),
        ({"OMP_PROC_BIND": "true", "KMP_AFFINITY": "compact"}, "unset OMP_PROC_BIND KMP_AFFINITY"),
        ({"OMP_PROC_BIND": "false", "KMP_AFFINITY": "compact"}, "unset KMP_AFFINITY  # or export KMP_AFFINITY=none"),
        ({"OMP_PROC_BIND": "true", "KMP_AFFINITY": "none"}, "unset OMP_PROC_BIND  # or export OMP_PROC_BIND=false"),
    ],
)
def test_a_variable_that_makes_openmp_bind_the_main_thread_is_named_and_unset(
    environ: dict[str, str], fix: str, tree_path: Path
) -> None:
    (finding,) = _bound("0-7", environ, tree_path)
    named = ", ".join(f"{name}={environ[name]}" for name in fix.partition("  #")[0].split()[1:])
    assert (finding.severity, finding.place, finding.fix) == ("W", "local rank 0", fix)
    assert finding.seen == f"importing torch narrows its mask of 8 CPUs to one place: {named}"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0-15"},
        {"OMP_PROC_BIND": "False"},
        {"OMP_PROC_BIND": ""},
        {"OMP_PLACES": "", "GOMP_CPU_AFFINITY": " "},
        {"KMP_AFFINITY": "none"},
        {"KMP_AFFINITY": "disabled"},
        {"KMP_AFFINITY": "verbose,granularity=core"},
        {"OMP_NUM_THREADS": "8"},
    ],
)
def test_variables_that_bind_no_thread_leave_the_mask_alone(environ: dict[str, str], tree_path: Path) -> None:
    assert _bound("0-7", environ, tree_path) == []


@pytest.mark.parametrize(
    ("cpus", "places", "severities"),
    [
        ("0-7", "sockets", []),
        ("8-15", "numa_domains(1)", []),
        ("0-7", "cores", ["W"]),
        ("0-15", "sockets", ["W"]),
        ("0-15", "numa_domains", ["W"]),
    ],
)
def test_a_place_narrows_only_a_mask_that_is_wider(
    cpus: str, places: str, severities: list[str], tree_path: Path
) -> None:
    environ = {"OMP_PROC_BIND": "close", "OMP_PLACES": places}
    assert [finding.severity for finding in _bound(cpus, environ, tree_path)] == severities


def test_a_socket_narrows_a_mask_of_two_also_where_the_kernel_has_one_numa_node(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 16)})
    for cpu in range(8, 16):
        machine.files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "1"
    for rank, cpus in enumerate(("0-15", "8-15")):
        machine.rank(rank, cpus, world=2, mems="0", environ={"OMP_PLACES": "sockets"})
    assert [finding.ranks for finding in _found(machine, "A10", tree_path)] == [(0,)]


def test_a_mask_of_one_cpu_is_information_unless_the_cgroup_has_no_other(tree_path: Path) -> None:
    environ = {"OMP_PROC_BIND": "close"}
    (finding,) = _bound("3", environ, tree_path / "bound", cgroup="0-7")
    assert (finding.severity, finding.seen) == (
        "I",
        "has 1 CPU, and importing torch may be what narrowed its mask: OMP_PROC_BIND=close",
    )
    assert _bound("3", environ, tree_path / "alone", cgroup="3") == []


def test_powersave_is_fine_where_the_processor_chooses(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 2)}, governor="powersave", driver="intel_pstate")
    assert _found(machine, "S01", tree_path) == []


def test_a_port_down_on_all_hosts_is_a_warning_and_on_one_a_failure(tree_path: Path) -> None:
    machines = [small_node("n1"), small_node("n2")]
    for machine in machines:
        machine.files["sys/class/infiniband/mlx5_1/ports/1/state"] = "1: DOWN"
        machine.files["sys/class/infiniband/mlx5_1/ports/1/phys_state"] = "2: Polling"
    machines[0].files["sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN"
    case = Case(hosts=lambda: machines)
    findings = run_rules(AuditedJob(case.snapshots(tree_path)), ["N05"]).findings
    assert sorted((f.severity, f.host, f.place) for f in findings) == [
        ("F", "n1", "mlx5_0 port 1"),
        ("W", "n1", "mlx5_1 port 1"),
        ("W", "n2", "mlx5_1 port 1"),
    ]


@each_case(
    ("value", "device", "chosen"),
    [
        ("mlx5", "mlx5_10", True),
        ("=mlx5_1", "mlx5_10", False),
        ("=mlx5_1,mlx5_10", "mlx5_10", True),
        ("^mlx5_1", "mlx5_10", False),
        ("^=mlx5_1", "mlx5_10", True),
        ("mlx5_10:1", "mlx5_10", True),
        ("mlx5_10:2", "mlx5_10", False),
        ("^mlx5_bond", "mlx5_0", True),
    ],
)
def test_adapters_are_chosen_as_nccl_does(value: str, device: str, chosen: bool) -> None:
    assert hca_selects(value, device, 1) is chosen


def test_expectations_of_a_site_fail_a_node(tree_path: Path) -> None:
    settings = AuditConfig(expect_gpus=8, expect_nics=2, expect_driver="570.86.15")
    findings = _found(small_node("n1"), "H01", tree_path, settings=settings)
    assert [(finding.severity, finding.seen) for finding in findings] == [("F", "GPUs: 2, the site expects 8")]


def test_a_rule_that_is_ignored_is_not_run(tree_path: Path) -> None:
    case = CASES["cgroup-cut"]
    settings = AuditConfig(ignore=("A03", "A04", "A06", "S01", "S04", "S06", "C01"))
    assert run_rules(AuditedJob(case.snapshots(tree_path), settings)).findings == ()


def test_an_unknown_rule_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match=r"'X1'.*A01 H01 A02"):
        run_rules(AuditedJob([]), ["X1"])


def test_fixes_have_no_control_characters_whatever_devices_are_called(tree_path: Path) -> None:
    machine = small_node("n1;reboot")
    evil = "eth\x1b[2J$(reboot)\n"
    machine.net(evil, mtu=1500, speed=1_000)
    machine.files[f"sys/class/net/{evil}/statistics/rx_dropped"] = "999999999"
    other = small_node("n2")
    other.net(evil, mtu=9000, speed=1_000)
    case = Case(hosts=lambda: [machine, other])
    findings = run_rules(AuditedJob(case.snapshots(tree_path))).findings
    assert any("eth\\x1b" in finding.fix for finding in findings)
    assert all(finding.fix.isprintable() and finding.seen.isprintable() for finding in findings)
    quoted = [finding.fix for finding in findings if "$(reboot)" in finding.fix]
    assert all(re.search(r"'[^']*\$\(reboot\)[^']*'", fix) for fix in quoted)


def test_findings_do_not_depend_on_the_order_of_hosts(tree_path: Path) -> None:
    case = CASES["mtu-differs"]
    snapshots = case.snapshots(tree_path)
    forward = run_rules(AuditedJob(snapshots, case.settings)).findings
    assert run_rules(AuditedJob(snapshots[::-1], case.settings)).findings == forward


def test_a_mutable_copy_of_hardware_gives_the_same_findings(tree_path: Path) -> None:
    case = CASES["two-dgx"]
    snapshots = case.snapshots(tree_path)
    copied = [dataclasses.replace(snapshot, hardware=dataclasses.replace(snapshot.hardware)) for snapshot in snapshots]
    assert run_rules(AuditedJob(copied)).findings == run_rules(AuditedJob(snapshots)).findings


def test_a_gpu_far_from_nodes_of_which_none_has_cpus_is_unknown(tree_path: Path) -> None:
    machine = small_node("n1")
    machine.files |= {f"sys/devices/system/node/node{number}/cpulist": "" for number in (0, 1)}
    machine.files["sys/devices/system/node/node1/distance"] = "20 10"
    machine.files["sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/numa_node"] = "1"
    machine.files["sys/devices/system/node/node0/distance"] = "10 20"
    findings = run_rules(AuditedJob(Case(hosts=lambda: [machine]).snapshots(tree_path)), ["A02"]).findings
    assert {finding.severity for finding in findings} == {Severity.UNKNOWN}
    assert "which NUMA node has CPUs: all are listed without any" in findings[0].seen
