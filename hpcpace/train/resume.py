"""Where a training resumes: ranks agree on the same data, one run directory, and the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpcpace.core.environment import RankInfo, process_environ
from hpcpace.core.errors import ConfigError, DataError, HpcpaceError
from hpcpace.core.rundir import Attempt, RunDirectory, default_run_path
from hpcpace.train.checkpoint import find_checkpoint
from hpcpace.train.checkpoint_history import History, read_history
from hpcpace.train.plan import TrainPlan


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a training starts.

    Attributes:
        run: the run directory, absolute.
        attempt_number: the number of this attempt in it.
        checkpoint: what to resume from; None to start from scratch.
        history: what was done before it.
    """

    run: RunDirectory
    attempt_number: int
    checkpoint: Path | None = None
    history: History = field(default_factory=History)

    @property
    def attempt(self) -> Attempt:
        """The folder of this attempt."""
        return self.run.attempt(self.attempt_number)

    def facts(self) -> dict[str, Any] | None:
        """Return what a run records about it; None when it starts from scratch."""
        if self.checkpoint is None:
            return None
        return {"checkpoint": str(self.checkpoint), "num_steps": self.history.num_steps}


def agree_on_start(plan: TrainPlan, *, info: RankInfo, name: str, run_dir: Path | None, data_digest: str) -> StartPoint:
    """Return where the training starts, the same on all ranks; rank 0 looks it up.

    Collective: every rank of the default process group calls this.

    Args:
        plan: the run.
        info: this rank's place.
        name: names the run directory if none is given.
        run_dir: the run directory.
        data_digest: identifies the data.

    Raises:
        DataError: ranks read different data, or the checkpoint does not fit.
        ConfigError: a fault names a host that is not in the job.
    """
    start: StartPoint | str = ""
    if info.rank == 0:
        try:
            start = _start(plan, run_dir or default_run_path(name, process_environ()), data_digest)
        except (HpcpaceError, OSError) as error:  # the other ranks wait for an answer
            start = str(error)
    seen: list[Any] = [None] * info.world_size
    dist.all_gather_object(seen, (data_digest, info.host, start))
    _check_same_data([(digest, host) for digest, host, _ in seen])
    _check_hosts_of_faults(plan, {host for _, host, _ in seen})
    start = seen[0][2]
    if isinstance(start, str):
        raise DataError(start)
    return start


def _start(plan: TrainPlan, path: Path, data_digest: str) -> StartPoint:
    run = RunDirectory(path.absolute())
    number, resume = run.next_attempt_number, plan.settings.resume
    # A requeued job resumes from its own last checkpoint, even if it started from another run's.
    checkpoint = find_checkpoint(run.path) if number and resume != "never" else None
    if checkpoint is None and resume not in ("auto", "never"):
        checkpoint = find_checkpoint(Path(resume).absolute())
        if checkpoint is None:
            raise DataError(f"{resume} holds no complete checkpoint: set --resume to a run or its checkpoints/step-N")
    if checkpoint is None:
        return StartPoint(run=run, attempt_number=number)
    history = read_history(checkpoint, plan, data_digest=data_digest)
    if history.num_steps >= plan.settings.steps:
        raise DataError(
            f"{checkpoint} has done {history.num_steps} steps, and --steps is {plan.settings.steps}: use more --steps, "
            "another --run-dir, or --resume never"
        )
    return StartPoint(run=run, attempt_number=number, checkpoint=checkpoint, history=history)


def _check_same_data(seen: Sequence[tuple[str, str]]) -> None:
    other = next((rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} on {seen[other][1]} reads different data from rank 0 on {seen[0][1]}: "
            "give data that all hosts have with --data"
        )


def _check_hosts_of_faults(plan: TrainPlan, hosts: set[str]) -> None:
    for fault in plan.faults:
        if fault.host is not None and not any(fault.concerns(-1, host) for host in hosts):
            raise ConfigError(f"fault on host {fault.host!r}: the job runs on {', '.join(sorted(hosts))}")
