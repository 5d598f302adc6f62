"""Which run directory a job records into: one for all of its ranks and for all of their restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hpcpace.observe.launch import Launch
from hpcpace.rundir import RunDirectory

_MOST_BYTES = 1 << 24


def run_place(launch: Launch, command: Sequence[str]) -> str:
    """Return the run directory for this rank's job; that of rank 0 counts.

    Restarts of the same command under the same launch are attempts of one run. A launch that runs several commands, as
    a shell script may, gives each its own run directory.

    Args:
        launch: the launch that this process belongs to.
        command: sys.argv of this process, without secrets.
    """
    place = launch.run_dir
    for number in count(2):
        if _takes(RunDirectory(Path(place)), launch, list(command)):
            break
        place = f"{launch.run_dir}-{number}"
    return place


def _takes(run: RunDirectory, launch: Launch, command: list[str]) -> bool:
    attempts = run.attempts()
    if not attempts:
        return True
    try:
        with attempts[-1].open() as folder:
            record = json.loads(folder.read(attempts[-1].run_json.name, most_bytes=_MOST_BYTES))
        if record.get("launch") == launch.identity:
            return bool(record["command"] == command)
    except (OSError, ValueError, KeyError, AttributeError):  # not ours, then
        pass
    # A requeued job comes back to its run, and so does who names one.
    return not launch.is_new_run
