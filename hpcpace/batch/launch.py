"""The command line that starts the ranks of a job: srun with a part for each component, or hpcpace itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcpace.batch.allocation import Allocation, Component


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks of a job are started, the same for its audit and its training.

    Attributes:
        program: words that run hpcpace.
        allocation: the job in Slurm; None without Slurm.
        options: options of srun for all ranks, such as `--mpi=pmi2`.
    """

    program: tuple[str, ...]
    allocation: Allocation | None
    options: tuple[str, ...] = ()

    def command(self, words: Sequence[str], *options: str) -> list[str]:
        """Return the command line that runs `hpcpace WORDS` as every rank.

        Args:
            words: command of hpcpace and its arguments.
            options: options of srun for this start only.
        """
        return self._line(words, _tasks, options)

    def command_of_nodes(self, words: Sequence[str], *options: str) -> list[str]:
        """Return the command line that runs `hpcpace WORDS` once on each node."""
        return self._line(words, _task_of_node, options)

    def _line(self, words: Sequence[str], tasks: Callable[[Component], list[str]], options: Sequence[str]) -> list[str]:
        ranks = [*self.program, *words]
        if self.allocation is None:
            return ranks
        components = self.allocation.components
        line = ["srun"]
        for number, component in enumerate(components):
            group = [f"--het-group={number}"] if len(components) > 1 else []
            line += [":"] if number else []
            line += [*tasks(component), *options, *self.options, *group, *ranks]
        return line

    def with_option(self, option: str) -> Launch:
        """Return the same launch with one more option of srun."""
        return dataclasses.replace(self, options=(*self.options, option))

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks: unbuffered output, and under Slurm the threads that their CPUs allow."""
        # Otherwise the last lines of a killed rank stay in Python's buffer.
        made = {**environ, "PYTHONUNBUFFERED": "1"}
        if self.allocation is not None:
            fewest = min(component.cpus_per_task for component in self.allocation.components)
            made["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(fewest)
        return made


def gpu_options(environ: Mapping[str, str], options: Sequence[str]) -> tuple[str, ...]:
    """Return what srun needs to give each rank its own slice where the GPUs of a node are slices (MIG).

    CUDA shows a process only the first slice in CUDA_VISIBLE_DEVICES, so all ranks of a node would share it.
    """
    slices = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith("MIG-")]
    chosen = "--gpu-bind", "--gpus-per-task", "--gres"
    is_chosen = any(option.startswith(chosen) for option in options)
    is_bound = environ.get("SLURM_GPU_BIND") or environ.get("SLURM_GPUS_PER_TASK")
    return () if len(slices) < 2 or is_chosen or is_bound else ("--gpu-bind=per_task:1",)


def _task_of_node(component: Component) -> list[str]:
    return [*_tasks(dataclasses.replace(component, num_tasks=component.num_nodes)), "--ntasks-per-node=1"]


def _tasks(component: Component) -> list[str]:
    # Since Slurm 22.05 srun no longer inherits the CPUs per task from the job, so -c is repeated. It excludes the
    # CPUs per GPU, which srun does inherit.
    cpus = [] if component.has_cpus_of_gpus else ["-c", str(component.cpus_per_task)]
    return ["--ntasks", str(component.num_tasks), *cpus]
