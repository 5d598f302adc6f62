"""How far the training of a checkpoint was: progress.json, which rank 0 writes last and reads first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcpace.core.errors import DataError
from hpcpace.core.files import Folder, read_most
from hpcpace.core.text import shown
from hpcpace.train.checkpoint_folder import (
    WRITERS_FILE_MODE,
    check_files,
    open_checkpoint,
    open_checkpoint_file,
    unreadable,
)
from hpcpace.train.plan import TrainPlan

CHECKPOINT_SCHEMA = "hpcpace-checkpoint/2"
PROGRESS = "progress.json"
# A loss takes some 30 bytes, an evaluation some 150. The rest is for runs that had more steps than they are given now.
_BYTES_PER_STEP = 512
_MOST_OTHER_BYTES = 16 << 20
# Settings that change nothing of the losses; all others must be as they were.
_FREE_SETTINGS = (
    *(
        "steps",
        "warmup_steps",
        "log_every",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "resume",
        "inject",
        "shared_cores",
    ),
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


def read_history(path: Path, plan: TrainPlan, *, data_digest: str) -> History:
    """Return how far the training of a checkpoint was.

    Raises:
        DataError: it cannot be read, somebody else could have written to it, or it belongs to a training with other
            settings or data.
    """
    most_bytes = _MOST_OTHER_BYTES + _BYTES_PER_STEP * plan.settings.steps
    with open_checkpoint(path) as folder:
        check_files(folder)
        descriptor = open_checkpoint_file(folder, PROGRESS)
        try:
            identity, history = _parse(read_most(descriptor, most_bytes))
        # json raises RecursionError for lists in lists in lists, float OverflowError for a number of 400 digits.
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            raise unreadable(path, f"{PROGRESS}: {error}") from error
        finally:
            os.close(descriptor)
    wanted = identity_of(plan, data_digest)
    for key in sorted(wanted.keys() | identity.keys()):
        if identity.get(key) != wanted.get(key):
            name = key if key in wanted else shown(key)
            raise DataError(
                f"the checkpoint {path} was trained with {name} {shown(identity.get(key))}, not "
                f"{shown(wanted.get(key))}: use the same settings, another --run-dir, or --resume never"
            )
    return history


def write_history(folder: Folder, history: History, identity: Mapping[str, Any]) -> None:
    """Write how far a training is into its checkpoint, and bring it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    content = {"schema": CHECKPOINT_SCHEMA, "identity": identity, **asdict(history)}
    folder.write(PROGRESS, json.dumps(content, indent=2, sort_keys=True) + "\n", mode=WRITERS_FILE_MODE)
    descriptor = folder.open_file(PROGRESS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity_of(plan: TrainPlan, data_digest: str) -> dict[str, Any]:
    """Return the settings that a training must keep, as plain values."""
    settings = {key: value for key, value in asdict(plan.settings).items() if key not in _FREE_SETTINGS}
    return {**settings, "seq_len": plan.seq_len, "mesh": str(plan.mesh), "data": data_digest}


def _parse(data: bytes) -> tuple[dict[str, Any], History]:
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it is not a table")
    if content.get("schema") != CHECKPOINT_SCHEMA:
        raise ValueError(f"it has schema {shown(content.get('schema'))}, not {CHECKPOINT_SCHEMA}")
    identity, num_steps = content.get("identity"), content.get("num_steps")
    losses, evaluations = content.get("losses"), content.get("evaluations")
    if not isinstance(identity, dict):
        raise ValueError("its identity is not a table")
    # To Python, true is an int as well.
    if type(num_steps) is not int or num_steps < 0:
        raise ValueError(f"it claims {shown(num_steps)} steps")
    # The losses of a training that diverged are NaN.
    if not isinstance(losses, list) or any(type(loss) not in (int, float) for loss in losses):
        raise ValueError("its losses are not a list of numbers")
    if len(losses) != num_steps:
        raise ValueError(f"it has {len(losses)} losses for {num_steps} steps")
    if not isinstance(evaluations, list) or not all(map(_is_evaluation, evaluations)):
        raise ValueError("its evaluations are not a list of numbers by name")
    losses = tuple(float(loss) for loss in losses)
    return identity, History(num_steps=num_steps, losses=losses, evaluations=tuple(evaluations))


def _is_evaluation(value: Any) -> bool:
    return isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())
