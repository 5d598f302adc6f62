"""The srun lines of a job."""

from __future__ import annotations

from cases import each_case

from hpcpace.batch.launch import Allocation, Component, Launch, gpu_options

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
