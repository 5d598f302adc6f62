"""Checkpoints: a training resumes after a stop as if there had been none.

A checkpoint is a folder `step-N` of safetensors, which torch.distributed.checkpoint writes and reads: each rank writes
the tensors that no other rank has, and rank 0 adds progress.json. It is written under another name and renamed when
all of it is on disk, so that a job that is killed meanwhile leaves the previous one. Nobody but the user can write to
it, and safetensors hold no code. All ranks agree on the same data, one run directory, and one checkpoint to resume
from.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpcpace.core.environment import RankInfo, process_environ
from hpcpace.core.errors import ConfigError, DataError, HpcpaceError, TrainingFailed
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory, default_run_path
from hpcpace.core.text import printable, shortened, shown
from hpcpace.train.checkpoint_folder import (
    PROGRESS,
    NewCheckpoint,
    TrainingHistory,
    check_access,
    check_files,
    clear_checkpoints,
    held_path,
    identity_of,
    open_checkpoint,
    read_history,
    unreadable,
    write_history,
)
from hpcpace.train.data_parallel import OuterOptimizer
from hpcpace.train.parallel import Replica
from hpcpace.train.plan import TrainPlan
from hpcpace.train.settings import Mesh

_NUM_KEPT = 2
_NAME = re.compile(r"step-([0-9]+)")
_T = TypeVar("_T")


def find_checkpoint(path: Path) -> Path | None:
    """Return the last whole checkpoint of a run, or the path itself where it is a checkpoint; None without any.

    Raises:
        DataError: the folder of the run's checkpoints cannot be read, or somebody else could have put one there.
    """
    try:
        run = Folder.open(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    name = RunDirectory(path).checkpoint_dir.name
    with run:
        try:
            names = run.names()
            if PROGRESS in names:
                return path
            if name not in names:
                return None
            with run.folder(name) as folder:
                found = _last_whole(folder)
                if found is not None:
                    check_access(folder.descriptor, folder.path, checkpoint=found)
                return found
        except OSError as error:
            raise unreadable(path, error) from error


def _last_whole(folder: Folder) -> Path | None:
    numbered = [(int(match.group(1)), name) for name in folder.names() if (match := _NAME.fullmatch(name))]
    for _, name in sorted(numbered, reverse=True):
        with folder.folder(name) as checkpoint:
            if PROGRESS in checkpoint.names():
                return checkpoint.path
    return None


class Checkpoints:
    """Writes and reads the checkpoints of a run.

    Args:
        folder: where they lie.
        plan: the run.
        place: this rank's place in the mesh.
        replica: this rank's part of the model.
        optimizer: its optimizer.
        group: all ranks, of backend gloo; None in a world of one.
        data_digest: identifies the data.
        outer: the optimizer of the rounds of local SGD, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plan: TrainPlan,
        place: Mesh,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        data_digest: str,
        outer: OuterOptimizer | None = None,
    ) -> None:
        self._folder = folder
        self._identity = identity_of(plan, data_digest)
        self._stages = list(zip(plan.stages_of(place), replica.stages, strict=True))
        # ZeroRedundancyOptimizer keeps the state of this rank's share in an optimizer of its own.
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        self._outer = outer
        self._place, self._group = place, group
        self._replicas_differ = plan.settings.sync_every > 1
        self._is_writer = dist.get_rank() == 0

    def save(self, history: TrainingHistory) -> Path:
        """Write a checkpoint, and remove all but the last ones once it is whole; return its path.

        Collective: every rank calls this.

        Raises:
            TrainingFailed: it cannot be written; the ones before are still there. All ranks raise alike.
        """
        target = self._folder / f"step-{history.num_steps:08d}"

        def failed(error: BaseException) -> TrainingFailed:
            return TrainingFailed(f"cannot write the checkpoint {target}: {reason_of(error)}")

        with ExitStack() as held, _quiet():
            self._agree(lambda: clear_checkpoints(self._folder) if self._is_writer else None, failed)
            new = self._agree(lambda: held.enter_context(NewCheckpoint(self._folder, target.name)), failed)
            try:
                with new.writer() as writer:
                    dcp.save(self._state(is_saved=True), storage_writer=writer, process_group=self._group)
            except (dcp.CheckpointException, OSError) as error:
                raise failed(error) from error
            self._agree(lambda: self._finish(new, history) if self._is_writer else None, failed)
        return target

    def load(self, path: Path) -> None:
        """Set parameters, buffers and the optimizer's state to those of a checkpoint.

        Collective: every rank calls this.

        Raises:
            DataError: the checkpoint lacks something, cannot be read, or somebody else could have written to it. All
                ranks raise alike.
        """
        _make_state(self._optimizer)
        with ExitStack() as held, _quiet():
            reader = self._agree(
                lambda: _TensorReader(held.enter_context(open_checkpoint(path))),
                lambda error: error if isinstance(error, DataError) else unreadable(path, reason_of(error)),
            )
            try:
                dcp.load(
                    self._state(is_saved=False),
                    storage_reader=reader,
                    planner=_SameTensors(),
                    process_group=self._group,
                )
            except (dcp.CheckpointException, OSError, RuntimeError) as error:
                raise unreadable(path, reader.named(reason_of(error))) from error

    def _state(self, *, is_saved: bool) -> dict[str, Tensor]:
        """Return this rank's tensors, each under a name that only ranks with the same values share."""
        prefix = f"dp{self._place.dp}." if self._replicas_differ else ""
        prefix += f"tp{self._place.tp}."
        state: dict[str, Tensor] = {}
        of_rounds = {} if self._outer is None else self._outer.state()
        for index, stage in self._stages:
            names = {parameter: name for name, parameter in stage.named_parameters()}
            for parameter, name in names.items():
                key = f"{prefix}stage{index}.{name}"
                state[key] = parameter.detach()
                kept = {**self._optimizer.state.get(parameter, {}), **of_rounds.get(parameter, {})}
                state |= {f"{key}.{what}": value for what, value in kept.items()}
            # Running statistics of replicas differ until DDP sends those of the first one around.
            if not is_saved or self._replicas_differ or self._place.dp == 0:
                state |= {f"{prefix}stage{index}.{name}": buffer for name, buffer in stage.named_buffers()}
        return state

    def _finish(self, new: NewCheckpoint, history: TrainingHistory) -> None:
        write_history(new.folder, history, self._identity)
        new.publish(num_kept=_NUM_KEPT)

    def _agree(self, action: Callable[[], _T], failed: Callable[[BaseException], HpcpaceError]) -> _T:
        """Do something on all ranks, and raise on all of them alike where one cannot."""
        result: _T | None = None
        error: HpcpaceError | None = None
        try:
            result = action()
        except (HpcpaceError, OSError) as caught:
            error = failed(caught)
        errors = [error]
        if self._group is not None:
            errors = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(errors, error, group=self._group)
        for first in filter(None, errors):
            raise first
        return cast(_T, result)


class _SameTensors(dcp.DefaultLoadPlanner):
    """Loads whole tensors into ones of their type, where torch would convert them and leave gaps as they are."""

    def create_local_plan(self) -> dcp.LoadPlan:
        """Return the plan of this rank.

        Raises:
            ValueError: a tensor is of another type, or parts of it are missing or there twice.
        """
        assert self.metadata is not None
        for name, wanted in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                continue  # torch says which are missing
            if stored.properties.dtype != wanted.dtype:
                raise ValueError(f"{name} has type {stored.properties.dtype}, not {wanted.dtype}")
            if stored.size != wanted.size():
                raise ValueError(f"{name} has shape {shown(tuple(stored.size))}, not {shown(tuple(wanted.size()))}")
            num_dims = {len(place) for chunk in stored.chunks for place in (chunk.offsets, chunk.sizes)}
            num_elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if num_dims != {len(stored.size)} or num_elements != math.prod(stored.size):
                raise ValueError(f"the parts of {name} do not make up its shape {shown(tuple(stored.size))}")
        return super().create_local_plan()


class _TensorReader(HuggingFaceStorageReader):
    """Reads the tensors of a checkpoint whose folder is held, so that nobody can exchange it.

    Raises:
        DataError: somebody else could have written to it, or its headers cannot be read.
    """

    def __init__(self, folder: Folder) -> None:
        check_files(folder)
        super().__init__(held_path(folder))
        self._folder = folder
        try:
            self._metadata = super().read_metadata()
        except Exception as error:  # whatever headers that somebody made up let torch and safetensors raise
            raise unreadable(folder.path, self._damaged() + self.named(reason_of(error))) from error

    def _damaged(self) -> str:
        """Return the name of the first file whose header cannot be read, which torch does not say, and a colon."""
        for name in sorted(filter(lambda name: name.endswith(".safetensors"), self._folder.names())):
            try:
                with safe_open(f"{held_path(self._folder)}/{name}", framework="pt"):
                    pass
            except Exception:  # as above
                return f"{shown(name)}: "
        return ""

    # Torch logs a traceback where this fails, so it was done before.
    def read_metadata(self) -> Metadata:
        """Return what the headers say."""
        return self._metadata

    def named(self, reason: str) -> str:
        """Return a reason with the names that users know."""
        return reason.replace(held_path(self._folder), str(self._folder.path))


def reason_of(error: BaseException) -> str:
    """Return the first cause of an error that torch.distributed.checkpoint or the file system raised, in a line."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return shortened(printable(" ".join((str(error) or type(error).__name__).splitlines()[:1])), max_letters=300)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, to be overwritten, by a step that moves nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _quiet() -> Iterator[None]:
    # torch warns of its own deprecated calls, and that a world of one has nobody to talk to.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cause(error: BaseException) -> BaseException:
    """Return the first cause: torch packs the errors of all ranks into one."""
    inner = next(iter(error.failures.values()), None) if isinstance(error, dcp.CheckpointException) else None
    return inner[0] if inner else error


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
    history: TrainingHistory = field(default_factory=TrainingHistory)

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
