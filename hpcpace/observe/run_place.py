"""Which run directory a job records into: one for all of its ranks and for all of their restarts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.rundir import RunDirectory
from hpcpace.observe.launch import Launch


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
    record = read_json(attempts[-1], attempts[-1].run_json.name, json_object, []) or {}
    if record.get("launch") == launch.identity and "command" in record:
        return bool(record["command"] == command)
    # A requeued job comes back to its run, and so does who names one.
    return not launch.is_new_run
