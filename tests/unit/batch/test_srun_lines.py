"""The srun lines of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.batch.launch import Allocation, Component, Launch, gpu_options, placement_options
from hpcpace.core.errors import UsageError

ONE = Component(num_nodes=2, num_tasks=8, cpus_per_task=6)


def _launch(*components: Component, options: tuple[str, ...] = ()) -> Launch:
    return Launch(program=("hpcpace",), allocation=Allocation(job="17", components=components), options=options)


def test_without_slurm_hpcpace_starts_the_ranks() -> None:
    assert Launch(program=("hpcpace",), allocation=None).command(["audit"], "--label") == ["hpcpace", "audit"]


def test_arguments_stay_whole() -> None:
    words = ["train", "", "a  b", "it's", "*", "$(id)", "new\nline"]
    assert _launch(ONE).command(words)[-8:] == ["hpcpace", *words]


def test_one_srun_starts_all_components_of_a_heterogeneous_job() -> None:
    launch = _launch(
        Component(num_nodes=1, num_tasks=1, cpus_per_task=1), Component(num_nodes=2, num_tasks=4, cpus_per_task=2)
    )
    first = ["--ntasks", "1", "-c", "1", "--label", "--het-group=0", "hpcpace", "audit"]
    second = ["--ntasks", "4", "-c", "2", "--label", "--het-group=1", "hpcpace", "audit"]
    assert launch.command(["audit"], "--label") == ["srun", *first, ":", *second]
    assert launch.environ({})["OMP_NUM_THREADS"] == "1"


def test_one_task_of_each_node_is_asked_for_in_each_component() -> None:
    launch = _launch(
        Component(num_nodes=1, num_tasks=1, cpus_per_task=1), Component(num_nodes=2, num_tasks=4, cpus_per_task=2)
    )
    line = " ".join(launch.command(["collect"], per_node=True))
    first = "--ntasks 1 -c 1 --ntasks-per-node=1 --het-group=0"
    second = "--ntasks 2 -c 2 --ntasks-per-node=1 --het-group=1"
    assert line == f"srun {first} hpcpace collect : {second} hpcpace collect"


def test_cpus_of_a_gpu_are_left_to_slurm() -> None:
    launch = _launch(Component(num_nodes=1, num_tasks=4, cpus_per_task=8, has_cpus_of_gpus=True))
    assert "-c" not in launch.command(["audit"])
    assert launch.environ({})["OMP_NUM_THREADS"] == "8"


def test_the_number_of_threads_is_the_users_if_there_is_one() -> None:
    assert _launch(ONE).environ({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@each_case(
    ("devices", "options", "environ", "expected"),
    [
        ("0,1", (), {}, ()),
        ("MIG-a", (), {}, ()),
        ("MIG-a,MIG-b", (), {}, ("--gpu-bind=per_task:1",)),
        ("MIG-a,MIG-b", ("--gpu-bind=none",), {}, ()),
        ("MIG-a,MIG-b", (), {"SLURM_GPUS_PER_TASK": "1"}, ()),
        ("MIG-a,MIG-b", (), {"SLURM_GPU_BIND": "closest"}, ()),
    ],
)
def test_each_rank_gets_its_own_slice_of_a_gpu(
    devices: str, options: tuple[str, ...], environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert gpu_options({"CUDA_VISIBLE_DEVICES": devices, **environ}, options) == expected


def test_ranks_start_on_the_hosts_of_a_placement_and_what_runs_once_per_node_does_not(tmp_path: Path) -> None:
    file = tmp_path / "placement.txt"
    file.write_text("n1\nn2\n" * 4)
    options = placement_options(str(file), Allocation(job="17", components=(ONE,)), "n[1-2]")
    assert options == ("--distribution=arbitrary", f"--nodelist={file}")
    launch = Launch(program=("hpcpace",), allocation=Allocation(job="17", components=(ONE,)), placement=options)
    assert launch.command(["train"]) == ["srun", "--ntasks", "8", "-c", "6", *options, "hpcpace", "train"]
    assert options[0] not in launch.command(["collect"], per_node=True)


@each_case(
    ("hosts", "nodes", "components", "said"),
    [
        ("n1 n2", "n[1-2]", (ONE,), "has hosts for 2 ranks, and the job has 8"),
        ("n1 n3 " * 4, "n[1-2]", (ONE,), "different hosts (n[2-3]): use sbatch --nodelist"),
        ("n1 " * 8, "n[1-2]", (ONE,), "different hosts (n2)"),
        ("", "n[1-2]", (ONE,), "has hosts for 0 ranks"),
        ("n1 n2 " * 4, "n[1-2", (ONE,), "cannot be read"),
        (None, "n[1-2]", (ONE,), "No such file or directory"),
        ("n1 n2 " * 4, "n[1-2]", (ONE, ONE), "the components of a heterogeneous job have one each"),
        ("n1 n2 " * 4, "", (), "this is no Slurm job"),
    ],
)
def test_a_placement_of_another_job_is_refused(
    tmp_path: Path, hosts: str | None, nodes: str, components: tuple[Component, ...], said: str
) -> None:
    file = tmp_path / "placement.txt"
    if hosts is not None:
        file.write_text(hosts)
    allocation = Allocation(job="17", components=components) if components else None
    with pytest.raises(UsageError) as error:
        placement_options(str(file), allocation, nodes)
    assert said in str(error.value)


@each_case("option", ["-m", "--distribution=cyclic", "--nodelist=n1", "-wn1"])
def test_one_thing_alone_places_ranks(tmp_path: Path, option: str) -> None:
    (tmp_path / "placement.txt").write_text("n1\nn2\n" * 4)
    allocation = Allocation(job="17", components=(ONE,))
    with pytest.raises(UsageError, match="both place ranks: leave one out"):
        placement_options(str(tmp_path / "placement.txt"), allocation, "n[1-2]", ("--label", option))
