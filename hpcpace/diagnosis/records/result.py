"""What a report takes from result.json, the end of `hpcpace train`; nothing where it is missing or foreign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcpace.diagnosis.summary import RankMemory
from hpcpace.json_files import read_json
from hpcpace.rundir import Attempt

_MOST_BYTES = 1 << 26  # a loss a step, of two million
_MOST_NUMBER = 1 << 62
_MOST_TEXT = 500


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


def read_result_record(attempt: Attempt, problems: list[str]) -> ResultRecord:
    """Return what result.json says; a sentence is added to `problems` where it cannot be used."""
    found = read_json(attempt, attempt.result_json.name, _record, problems, most_bytes=_MOST_BYTES)
    return found or ResultRecord()


def _record(content: Any) -> ResultRecord:
    memory = [
        RankMemory(
            rank=_number(row["rank"]),
            rss_bytes=_number(row["rss_bytes"]),
            device_bytes=_number(row["device_bytes"]),
        )
        for row in content.get("peak_memory", [])
    ]
    return ResultRecord(
        outcome=str(content.get("outcome", ""))[:_MOST_TEXT],
        cause=str(content.get("cause", ""))[:_MOST_TEXT],
        memory=tuple(sorted(memory, key=lambda row: row.rank)),
    )


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST_NUMBER:
        raise ValueError(f"{value!r} is no number of a rank or of bytes")
    return value
