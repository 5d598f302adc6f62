"""Programs for races that are not commands of hpcpace: what audits, sessions and trainings write, and naive ones."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import save_snapshots
from hpcpace.audit.tree import Tree
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import NUM_OURS_OF_TRACES, RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

_NUM_FILES, _NUM_LOOKS, _NUM_CHECKPOINTS = 20, 1000, 3
_NAIVE_BYTES, _MOST_PRINTED = 1 << 22, 100


def save(folder: Path) -> int:
    """Save snapshots of two hosts as `hpcpace audit --save` does, again and again."""
    snapshots = [take_host(Tree(), host=host) for host in ("n0", "n1")]
    try:
        for _ in range(_NUM_FILES):
            save_snapshots(folder, snapshots)
    except HpcpaceError as error:
        print(error)
        return error.exit_code
    return 0


def record_start(path: Path) -> int:
    """Begin an attempt in somebody else's run and record into it, as a session does."""
    run = RunDirectory(path)
    warnings: list[str] = []
    try:
        attempt = run.new_attempt()
        header = TraceHeader(
            run_id="run", attempt=attempt.number, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="n0"
        )
        open_folder = partial(Folder.open, attempt.trace_dir, make=True, num_ours=NUM_OURS_OF_TRACES)
        with Recorder(
            attempt.trace_file(0), header, warn=warnings.append, flush_interval_s=0.001, open_folder=open_folder
        ) as recorder:
            attempt.write_json(attempt.run_json, {"ranks": []})
            for step in range(200):
                recorder.add_step(step, step * 10**6, (step + 1) * 10**6, 1, 0)
            recorder.flush()
        attempt.write_json(attempt.result_json, {"outcome": "finished"})
    except (OSError, HpcpaceError) as error:
        print(error, *warnings)
        return 2
    return int(bool(warnings))


def save_checkpoints(run: Path) -> int:
    """Write checkpoints into somebody else's run, as a training does."""
    # Only here: torch takes long to load, and much memory.
    import torch
    import torch.distributed.checkpoint as dcp

    from hpcpace.train.checkpoint import reason_of
    from hpcpace.train.checkpoint_folder import NewCheckpoint, clear_checkpoints

    torch.set_num_threads(1)
    folder = run / "checkpoints"
    try:
        clear_checkpoints(folder)
        for step in range(_NUM_CHECKPOINTS):
            with NewCheckpoint(folder, f"step-{step:08d}") as checkpoint:
                with checkpoint.writer() as writer:
                    dcp.save({"weight": torch.ones(8)}, storage_writer=writer, no_dist=True)
                checkpoint.publish(num_kept=2)
    except (dcp.CheckpointException, OSError, HpcpaceError) as error:
        print(reason_of(error))
        return 2
    return 0


def save_naively(folder: Path) -> int:
    """Write a file under a temporary name, change its mode by that name, and rename it: all by paths."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".n0.json.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(b" " * _NAIVE_BYTES)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / "n0.json")
    except OSError as error:
        print(error)
        return 2
    return 0


def read_naively(path: Path) -> int:
    """Look whether a path is a regular file, and only then open it: what is read may be another file."""
    for _ in range(_NUM_LOOKS):
        try:
            if path.is_file() and not path.is_symlink():
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                print(os.read(descriptor, _MOST_PRINTED))
                os.close(descriptor)
        except OSError as error:
            print(error)
    return 0
