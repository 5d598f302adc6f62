"""What an allocation is, from the variables that Slurm sets."""

from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.batch.launch import Component, read_allocation
from hpcpace.core.errors import UsageError

JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
# As Slurm 22.05 sets them in the batch script of `sbatch -N1 -n1 : -N2 -n3 -c2`.
OF_GROUPS = {
    "SLURM_HET_SIZE": "2",
    **{"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_0": "1"},
    **{"SLURM_JOB_NUM_NODES_HET_GROUP_1": "2", "SLURM_NTASKS_HET_GROUP_1": "3", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "2"},
}


def _components(**environ: str) -> tuple[Component, ...]:
    allocation = read_allocation({**JOB, **environ})
    assert allocation is not None
    return allocation.components


def test_there_is_none_outside_of_slurm() -> None:
    assert read_allocation({"SLURM_NTASKS": "8"}) is None


@each_case(
    ("environ", "num_tasks"),
    [
        ({"SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "4"}, 7),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 8),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, 7),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "2(x3),1"}, 8),
        ({}, 2),
    ],
)
def test_counts_tasks_however_they_were_asked_for(environ: dict[str, str], num_tasks: int) -> None:
    (component,) = _components(**environ)
    assert component.num_tasks == num_tasks


def test_an_element_of_an_array_is_a_job_of_its_own() -> None:
    # Slurm gives the last element to start the id of the whole array.
    environ = {**JOB, "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    allocation = read_allocation(environ)
    assert allocation is not None
    assert (allocation.job, allocation.element) == ("17_3", "3")


def test_a_heterogeneous_job_has_the_tasks_of_all_its_components() -> None:
    allocation = read_allocation({**JOB, **OF_GROUPS})
    assert allocation is not None
    assert (allocation.num_nodes, allocation.num_tasks) == (3, 4)
    assert [component.cpus_per_task for component in allocation.components] == [1, 2]


@each_case(
    ("environ", "cpus", "has_cpus_of_gpus"),
    [
        ({}, 1, False),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6, False),
        ({"SLURM_CPUS_PER_GPU": "8"}, 8, True),
        ({"SLURM_CPUS_PER_GPU": "8", "SLURM_CPUS_PER_TASK": "6"}, 6, False),
    ],
)
def test_a_task_has_its_own_cpus_or_those_of_its_gpu(
    environ: dict[str, str], cpus: int, has_cpus_of_gpus: bool
) -> None:
    (component,) = _components(**environ)
    assert (component.cpus_per_task, component.has_cpus_of_gpus) == (cpus, has_cpus_of_gpus)


@each_case(
    ("name", "value"),
    [("SLURM_HET_SIZE", "two"), ("SLURM_NTASKS", "08"), ("SLURM_TASKS_PER_NODE", "2(x"), ("SLURM_CPUS_PER_GPU", "-1")],
)
def test_refuses_what_slurm_does_not_set(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} is "):
        _components(**{name: value})
