"""What a report takes from result.json, the end of `hpcpace train`; nothing where it is missing or foreign."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hpcpace.report.summary import RankMemory
from hpcpace.rundir import Attempt

_MOST_BYTES = 1 << 28  # a loss a step, and a hundred bytes a rank


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """What a training came to.

    Attributes:
        outcome: finished, stopped or out of memory; empty where it is not known.
        cause: the words of the error where memory was not enough.
        memory: the most that each rank had, as far as they told it, ascending by rank.
    """

    outcome: str = ""
    cause: str = ""
    memory: tuple[RankMemory, ...] = ()


def read_result_record(attempt: Attempt) -> ResultRecord:
    """Return what can be read of result.json."""
    path = attempt.result_json
    try:
        # To open a FIFO would wait for a writer, and a device may have no end.
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ResultRecord()
        content = json.loads(path.read_text())
        return ResultRecord(
            outcome=str(content.get("outcome", "")),
            cause=str(content.get("cause", "")),
            memory=_memory(content.get("peak_memory", [])),
        )
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError):
        return ResultRecord()


def _memory(rows: Any) -> tuple[RankMemory, ...]:
    known = (
        RankMemory(rank=int(row["rank"]), rss_bytes=int(row["rss_bytes"]), device_bytes=int(row["device_bytes"]))
        for row in rows
    )
    return tuple(sorted(known, key=lambda row: row.rank))
