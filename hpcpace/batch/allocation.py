"""A Slurm allocation as its batch script, or a shell of salloc, sees it: how its commands name the job, and its tasks.

Elements of a job array and the components of a heterogeneous job have variables of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcpace.core.environment import expand_tasks_per_node
from hpcpace.core.errors import UsageError, WorldError
from hpcpace.core.text import shown

_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes that were asked for with one set of options; a job that is not heterogeneous has one component.

    Attributes:
        num_nodes: number of nodes.
        num_tasks: number of tasks, which need not be equally many on each node.
        cpus_per_task: CPUs of a task.
        has_cpus_of_gpus: whether a task gets its CPUs with its GPUs (`--cpus-per-gpu`), which excludes srun's `-c`.
    """

    num_nodes: int
    num_tasks: int
    cpus_per_task: int
    has_cpus_of_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes and tasks of a job.

    Attributes:
        job: the job as Slurm's commands take it. `SLURM_JOB_ID` of one element of an array is the id of the whole
            array, and what is sent there reaches all elements; an element alone is `15_3`.
        element: number of the element in its array; empty outside of one.
        components: components of the job, in the order of their ranks.
        num_restarts: how often the job was requeued.
    """

    job: str
    element: str = ""
    components: tuple[Component, ...]
    num_restarts: int = 0

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all components."""
        return sum(component.num_tasks for component in self.components)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all components."""
        return sum(component.num_nodes for component in self.components)


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process runs in; None outside of Slurm.

    Raises:
        UsageError: a variable of Slurm is not what Slurm sets.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    # These name folders, and go to commands of Slurm as they are.
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        whole_number(environ, name, 0)
    size = whole_number(environ, "SLURM_HET_SIZE", 1)
    suffixes = [f"_HET_GROUP_{number}" for number in range(size)] if size > 1 else [""]
    array, element = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return Allocation(
        job=f"{array}_{element}" if array and element else environ["SLURM_JOB_ID"],
        element=element if array else "",
        components=tuple(_component(environ, suffix) for suffix in suffixes),
        num_restarts=whole_number(environ, "SLURM_RESTART_COUNT", 0),
    )


def whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable that is a whole number.

    Raises:
        UsageError: it is something else.
    """
    text = environ.get(name) or str(default)
    if not _WHOLE.fullmatch(text):
        raise UsageError(f"{name} is {shown(text)}: it must be a whole number")
    return int(text)


def _component(environ: Mapping[str, str], suffix: str) -> Component:
    num_nodes = whole_number(environ, f"SLURM_JOB_NUM_NODES{suffix}", 1)
    per_node = whole_number(environ, f"SLURM_NTASKS_PER_NODE{suffix}", 0)
    num_tasks = whole_number(environ, f"SLURM_NTASKS{suffix}", 0) or num_nodes * per_node
    of_gpus = whole_number(environ, f"SLURM_CPUS_PER_GPU{suffix}", 0)
    of_task = whole_number(environ, f"SLURM_CPUS_PER_TASK{suffix}", 0)
    return Component(
        num_nodes=num_nodes,
        num_tasks=num_tasks or _tasks_of_nodes(environ, suffix) or num_nodes,
        cpus_per_task=of_task or of_gpus or 1,
        has_cpus_of_gpus=of_gpus > 0 and not of_task,
    )


def _tasks_of_nodes(environ: Mapping[str, str], suffix: str) -> int:
    """Return the sum of `2(x3),1`, which Slurm reckons where nobody asked for a number of tasks (`salloc -N4`)."""
    name = f"SLURM_TASKS_PER_NODE{suffix}"
    try:
        return sum(expand_tasks_per_node(environ.get(name, "")))
    except WorldError:
        raise UsageError(f"{name} is {shown(environ[name])}: it must be counts like 2(x3),1") from None
