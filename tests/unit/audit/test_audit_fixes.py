"""No fix that cannot help: the line suits the launcher, the container, and where a variable comes from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcpace.audit.facts import RankFacts, Snapshot
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import run_rules
from hpcpace.audit.settings import AuditConfig
from hpcpace.audit.snapshot import take_tree
from tests.machines.cases import small_node
from tests.machines.machine import Machine, dgx_h100, threaded


def _taken(machine: Machine, folder: Path) -> Snapshot:
    return take_tree(machine.write(folder))


def _with_ranks(snapshot: Snapshot, *ranks: RankFacts, **changed: object) -> Snapshot:
    chosen = ranks or snapshot.ranks
    return dataclasses.replace(snapshot, ranks=tuple(dataclasses.replace(rank, **changed) for rank in chosen))


def _fixes(snapshot: Snapshot, rule: str, **settings: int) -> list[str]:
    found = run_rules(AuditedJob([snapshot], AuditConfig(**settings)), [rule]).findings
    assert found, rule
    return list(dict.fromkeys(finding.fix for finding in found))


def _two_nodes(*cpus: str, threads: int = 0) -> Machine:
    numa = {0: threaded(0, 4, 8 * threads), 1: threaded(4, 4, 8 * threads)}
    machine = Machine("n1").processors(numa)
    for rank, own in enumerate(cpus):
        machine.rank(rank, own, world=len(cpus))
    return machine


def test_a_quota_of_a_quarter_of_a_core_is_lifted_where_it_is_set(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 2)}).rank(0, "0-1", world=1, mems="0", quota="25000 100000")
    (fix,) = _fixes(_taken(machine, tree_path), "A06")
    assert fix.startswith("docker update --cpus=2 CONTAINER") and "CPUQuota=200%" in fix and "cpu.max" in fix
    assert "srun -c" not in fix


@pytest.mark.parametrize(
    ("launcher", "begins"),
    [
        ("slurm", "srun --cpu-bind=mask_cpu:0xf,0xf0"),
        ("torchrun", "torchrun --numa-binding=exclusive"),
        ("pmi", "mpiexec --map-by core --bind-to core"),
        ("torch", "os.sched_setaffinity(0, ...)  # in each rank, by local rank: 0-3; 4-7"),
    ],
)
def test_ranks_that_share_cores_are_bound_by_what_started_them(launcher: str, begins: str, tree_path: Path) -> None:
    snapshot = _taken(_two_nodes("0-4", "3-7"), tree_path)
    (fix,) = _fixes(_with_ranks(snapshot, launcher=launcher), "A04")
    assert fix.startswith(begins) and ("srun" in fix) == (launcher == "slurm")


def test_a_rank_of_torchrun_is_not_moved_by_srun(tree_path: Path) -> None:
    snapshot = _taken(dgx_h100(), tree_path)
    far = dataclasses.replace(snapshot.ranks[0], cpus="56-69", launcher="torchrun")
    assert _fixes(_with_ranks(snapshot, far), "A02") == ["torchrun --numa-binding=node ..."]


@pytest.mark.parametrize(
    ("launcher", "begins"), [("slurm", "sbatch --exclusive"), ("single", "docker update --cpuset")]
)
def test_a_job_without_cpus_near_its_gpu_gets_some_before_it_is_bound(
    launcher: str, begins: str, tree_path: Path
) -> None:
    snapshot = _taken(dgx_h100(), tree_path)
    far = dataclasses.replace(snapshot.ranks[0], cpus="56-69", cgroup_cpus="56-111", launcher=launcher)
    (fix,) = _fixes(_with_ranks(snapshot, far), "A02")
    assert fix.startswith(begins) and "no CPU on NUMA 0" in fix


def test_no_option_gives_ranks_more_cpus_than_the_node_has(tree_path: Path) -> None:
    snapshot = _taken(_two_nodes("0", "1"), tree_path)
    assert _fixes(snapshot, "A05", dataloader_workers=1) == ["srun -c 2 ..."]
    (fix,) = _fixes(snapshot, "A05", dataloader_workers=7)
    assert fix == "# fewer data loader workers or ranks: 2 x 8 processes, and the node has 8 CPUs"


def test_memory_that_a_cgroup_forbids_is_not_bound_by_srun(tree_path: Path) -> None:
    snapshot = _taken(_two_nodes("4-7"), tree_path)
    (policy,) = _fixes(_with_ranks(snapshot, memory_policy="bind:0"), "A07")
    (cgroup,) = _fixes(_with_ranks(snapshot, memory_nodes="0"), "A07")
    assert policy.startswith("srun --mem-bind=local")
    assert cgroup.startswith("docker update --cpuset-mems=0-1 CONTAINER")


def test_more_ranks_than_gpus_need_fewer_ranks(tree_path: Path) -> None:
    snapshot = _taken(small_node("n1"), tree_path)
    one = snapshot.ranks[0]
    ranks = [dataclasses.replace(one, rank=number, local_rank=number, gpu=0) for number in range(3)]
    fixes = _fixes(_with_ranks(snapshot, *ranks, launcher="torchrun"), "A08")
    assert "torchrun --nproc-per-node=2 ...  # the node has 2 GPUs for 3 ranks" in fixes


@pytest.mark.parametrize(
    ("variables", "launcher", "begins"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "torchrun", "unset CUDA_VISIBLE_DEVICES"),
        ({}, "slurm", "srun --gpus-per-node=2"),
        ({}, "single", "docker run --gpus all"),
    ],
)
def test_a_rank_that_sees_no_gpu_is_told_what_hides_them(
    variables: dict[str, str], launcher: str, begins: str, tree_path: Path
) -> None:
    snapshot = _taken(small_node("n1"), tree_path)
    blind = dataclasses.replace(snapshot.ranks[0], gpus=(), gpu=-1, variables=variables, launcher=launcher)
    (fix,) = _fixes(_with_ranks(snapshot, blind), "A08")
    assert fix.startswith(begins)


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("variables", "unset NCCL_IB_DISABLE"),
        ("user_conf", "sed -i '/^NCCL_IB_DISABLE *=/d' ~/.nccl.conf"),
        ("etc", "sed -i '/^NCCL_IB_DISABLE *=/d' /etc/nccl.conf  # admin"),
    ],
)
def test_a_variable_is_removed_from_where_it_is_set(place: str, fix: str, tree_path: Path) -> None:
    snapshot = _taken(small_node("n1"), tree_path)
    setting = {"NCCL_IB_DISABLE": "1"}
    if place == "etc":
        snapshot = dataclasses.replace(snapshot, kernel=dataclasses.replace(snapshot.kernel, nccl_conf=setting))
    else:
        snapshot = _with_ranks(snapshot, **{place: setting})
    assert _fixes(snapshot, "N04") == [fix]


@pytest.mark.parametrize(
    ("state", "phys", "begins"),
    [
        ("INIT", "LinkUp", "sminfo; systemctl status opensm"),
        ("DOWN", "Disabled", "mlxlink -d mlx5_0 -p 1 --port_state UP"),
        ("DOWN", "Polling", "ibdiagnet; mlxlink -d mlx5_0"),
    ],
)
def test_a_cable_is_named_only_where_it_can_be_the_cause(state: str, phys: str, begins: str, tree_path: Path) -> None:
    machine = small_node("n1")
    machine.files["sys/class/infiniband/mlx5_0/ports/1/state"] = f"1: {state}"
    machine.files["sys/class/infiniband/mlx5_0/ports/1/phys_state"] = f"2: {phys}"
    machine.files["sys/class/infiniband/mlx5_0/ports/1/link_layer"] = "InfiniBand"
    (fix,) = _fixes(_taken(machine, tree_path), "N05")
    assert fix.startswith(begins)


def test_mkl_is_told_to_start_fewer_threads_where_it_has_a_variable_of_its_own(tree_path: Path) -> None:
    snapshot = _taken(_two_nodes("0-3", "4-7"), tree_path)
    (fix,) = _fixes(_with_ranks(snapshot, variables={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "64"}), "S04")
    assert fix == "export OMP_NUM_THREADS=4 MKL_NUM_THREADS=4"


def test_more_ranks_than_cpus_are_not_helped_by_one_thread_each(tree_path: Path) -> None:
    snapshot = _taken(_two_nodes(*["0-1"] * 3), tree_path)
    assert _fixes(snapshot, "S04") == ["srun --ntasks-per-node=2 ...  # 3 ranks on 2 CPUs"]


def test_more_ranks_than_cores_share_cores_whatever_the_binding(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 2, 2)})
    for rank in range(3):
        machine.rank(rank, str(rank), world=3, mems="0")
    assert _fixes(_taken(machine, tree_path), "S05") == ["srun --ntasks-per-node=2 ...  # the node has 2 cores"]


def test_gdr_level_is_no_fix_without_gpudirect_rdma(tree_path: Path) -> None:
    machine = small_node("n1").without("sys/devices/pci0000:10/0000:10:01.0/0000:12")
    snapshot = _taken(machine, tree_path)
    kernel = dataclasses.replace(snapshot.kernel, is_nvidia_open=False, modules={"nvidia": "1"})
    pci = tuple(
        dataclasses.replace(device, parents=(device.parents or ())[:1]) if device.kind != "bridge" else device
        for device in snapshot.hardware.pci or ()
    )
    hardware = dataclasses.replace(snapshot.hardware, pci=pci)
    fixes = _fixes(dataclasses.replace(snapshot, kernel=kernel, hardware=hardware), "N01")
    assert fixes and all(fix.startswith("# first what N09 says") for fix in fixes)
