"""Checkpoints: a training goes on after a stop as if there had been none.

A checkpoint is a folder `step-N` of torch.distributed.checkpoint, in which each rank writes what it alone has, with
progress.json beside. It is written under another name and renamed when all of it is on disk, so that a job that is
killed meanwhile leaves the one before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpcpace.errors import DataError, TrainingFailed
from hpcpace.rundir import RunDirectory, write_json
from hpcpace.train.mesh import Mesh
from hpcpace.train.parallel import Replica
from hpcpace.train.plan import TrainPlan

CHECKPOINT_SCHEMA = "hpcpace-checkpoint/1"
_NUM_KEPT = 2
_NAME = re.compile(r"step-(\d+)$")
_PROGRESS = "progress.json"
# Settings that change nothing of the losses; all others must be as they were.
_FREE_SETTINGS = (
    *("steps", "warmup_steps", "log_every", "eval_every", "eval_batches", "checkpoint_every", "resume", "inject"),
    *("data", "vocabulary", "mesh"),
)


@dataclass(frozen=True, kw_only=True)
class History:
    """What a training has come to by some step.

    Attributes:
        num_steps: steps done.
        losses: the loss of each.
        evaluations: facts of the evaluations so far.
    """

    num_steps: int = 0
    losses: tuple[float, ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()


def find_checkpoint(path: Path) -> Path | None:
    """Return the last whole checkpoint of a run, or the path itself where it is a checkpoint; None without any."""
    if (path / _PROGRESS).is_file():
        return path
    found = [
        (int(match.group(1)), entry)
        for entry in RunDirectory(path).checkpoint_dir.glob("step-*")
        if (match := _NAME.search(entry.name)) and (entry / _PROGRESS).is_file()
    ]
    return max(found)[1] if found else None


def read_history(path: Path, plan: TrainPlan, *, data_digest: str) -> History:
    """Return how far the training of a checkpoint was.

    Raises:
        DataError: it cannot be read, or belongs to a training with other settings or data.
    """
    try:
        content = json.loads((path / _PROGRESS).read_text())
        schema, identity = content["schema"], content["identity"]
        history = History(
            num_steps=content["num_steps"],
            losses=tuple(content["losses"]),
            evaluations=tuple(content["evaluations"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the checkpoint {path} ({error}): name another one with --resume") from error
    if schema != CHECKPOINT_SCHEMA:
        raise DataError(f"the checkpoint {path} has schema {schema!r}, not {CHECKPOINT_SCHEMA}: name another one")
    wanted = _identity(plan, data_digest)
    for key in sorted(wanted.keys() | identity.keys()):
        if identity.get(key) != wanted.get(key):
            raise DataError(
                f"the checkpoint {path} was trained with {key} {identity.get(key)!r}, not {wanted.get(key)!r}: give "
                "the same settings, another --run-dir, or --resume never"
            )
    return history


class Checkpoints:
    """Writes and reads the checkpoints of a run.

    Args:
        folder: where they lie.
        plan: the run.
        place: this rank's place in the mesh.
        replica: this rank's part of the model.
        optimizer: its optimizer.
        group: all ranks, of backend gloo; None in a world of one.
        data_digest: what tells the data from others.
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
    ) -> None:
        self._folder = folder
        self._identity = _identity(plan, data_digest)
        self._stages = list(zip(plan.stages_of(place), replica.stages, strict=True))
        # ZeroRedundancyOptimizer keeps the state of this rank's share in an optimizer of its own.
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        self._place, self._group = place, group
        self._replicas_differ = plan.settings.sync_every > 1
        self._is_writer = dist.get_rank() == 0

    def save(self, history: History) -> Path:
        """Write a checkpoint, and remove all but the last ones once it is whole; return its path.

        Collective: every rank calls this.

        Raises:
            TrainingFailed: it cannot be written; the ones before are still there. All ranks raise alike.
        """
        target = self._folder / f"step-{history.num_steps:08d}"
        writing = self._folder / f".{target.name}.writing"
        self._agree(lambda: self._begin(writing), target)
        with _quiet():
            try:
                dcp.save(self._state(is_saved=True), checkpoint_id=writing, process_group=self._group)
            except (dcp.CheckpointException, OSError) as error:
                raise TrainingFailed(f"cannot write the checkpoint {target}: {_reason(error)}") from error
        self._agree(lambda: self._finish(writing, target, history), target)
        return target

    def load(self, path: Path) -> None:
        """Set parameters, buffers and the optimizer's state to those of a checkpoint.

        Collective: every rank calls this.

        Raises:
            DataError: the checkpoint lacks something or cannot be read.
        """
        _make_state(self._optimizer)
        state = self._state(is_saved=False)
        with _quiet():
            try:
                dcp.load(state, checkpoint_id=path, process_group=self._group)
            except (dcp.CheckpointException, OSError, RuntimeError) as error:
                raise DataError(f"cannot read the checkpoint {path}: {_reason(error)}") from error

    def _state(self, *, is_saved: bool) -> dict[str, Tensor]:
        """Return this rank's tensors, each under a name that only ranks with the same values share."""
        prefix = f"dp{self._place.dp}." if self._replicas_differ else ""
        prefix += f"tp{self._place.tp}."
        state: dict[str, Tensor] = {}
        for index, stage in self._stages:
            names = {parameter: name for name, parameter in stage.named_parameters()}
            for parameter, name in names.items():
                key = f"{prefix}stage{index}.{name}"
                state[key] = parameter.detach()
                state |= {f"{key}.{what}": value for what, value in self._optimizer.state.get(parameter, {}).items()}
            # Running statistics of replicas differ until DDP sends those of the first one around.
            if not is_saved or self._replicas_differ or self._place.dp == 0:
                state |= {f"{prefix}stage{index}.{name}": buffer for name, buffer in stage.named_buffers()}
        return state

    def _begin(self, writing: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left_over in self._folder.glob(".step-*.writing"):
            shutil.rmtree(left_over)
        writing.mkdir()

    def _finish(self, writing: Path, target: Path, history: History) -> None:
        write_json(writing / _PROGRESS, {"schema": CHECKPOINT_SCHEMA, "identity": self._identity, **asdict(history)})
        _synchronise(writing / _PROGRESS)
        _synchronise(writing)
        if target.exists():
            shutil.rmtree(target)
        os.replace(writing, target)
        _synchronise(self._folder)
        # Later ones are of a training that was begun anew.
        whole = sorted(self._folder.glob("step-*"))
        last = whole.index(target) + 1
        for other in {*whole} - {*whole[max(last - _NUM_KEPT, 0) : last]}:
            shutil.rmtree(other, ignore_errors=True)

    def _agree(self, action: Callable[[], None], target: Path) -> None:
        """Let rank 0 do something, and let all ranks know whether it could."""
        told: list[str | None] = [None]
        if self._is_writer:
            try:
                action()
            except OSError as error:
                told = [_reason(error)]
        if self._group is not None:
            dist.broadcast_object_list(told, src=0, group=self._group)
        if told[0] is not None:
            raise TrainingFailed(f"cannot write the checkpoint {target}: {told[0]}")


def _identity(plan: TrainPlan, data_digest: str) -> dict[str, Any]:
    """Return the settings that a training must keep, as plain values."""
    settings = {key: value for key, value in asdict(plan.settings).items() if key not in _FREE_SETTINGS}
    return {**settings, "seq_len": plan.seq_len, "mesh": str(plan.mesh), "data": data_digest}


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


def _reason(error: BaseException) -> str:
    """Return the first cause in a line: torch packs the errors of all ranks into one."""
    if isinstance(error, dcp.CheckpointException):
        inner = next(iter(error.failures.values()), None)
        error = inner[0] if inner else error
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return " ".join(text.splitlines()[:1])


def _synchronise(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
