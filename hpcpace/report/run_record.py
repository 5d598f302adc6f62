"""What a report takes from run.json, which knows ranks without a trace, too; nothing where it is missing or foreign."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcpace.rundir import Attempt

_MOST_BYTES = 1 << 26  # some hundreds for each rank


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one attempt.

    Attributes:
        hosts: host names by rank.
        emulation: in what way the speed of computation was not real, as in a lab; empty where it was.
        versions: names and versions of what ran.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    emulation: str = ""
    versions: tuple[tuple[str, str], ...] = ()


def read_run_record(attempt: Attempt) -> RunRecord:
    """Return what can be read of run.json."""
    try:
        # To open a FIFO would wait for a writer, and a device may have no end.
        if not attempt.run_json.is_file() or attempt.run_json.stat().st_size > _MOST_BYTES:
            return RunRecord()
        content = json.loads(attempt.run_json.read_text())
    except (OSError, ValueError, RecursionError):
        return RunRecord()
    return RunRecord(hosts=_hosts(content), emulation=_emulation(content), versions=_versions(content))


def _hosts(content: Any) -> dict[int, str]:
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in content["ranks"]}
    except (ValueError, TypeError, KeyError):
        return {}


def _emulation(content: Any) -> str:
    try:
        return str(content["environment"].get("HPCPACE_LAB_EMULATION", ""))
    except (AttributeError, TypeError, KeyError):
        return ""


def _versions(content: Any) -> tuple[tuple[str, str], ...]:
    try:
        return tuple((str(name), str(version)) for name, version in content["versions"].items() if version)
    except (AttributeError, TypeError, KeyError):
        return ()
