"""What a report takes from run.json, which knows ranks without a trace, too; nothing where it is missing or foreign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcpace.json_files import read_json
from hpcpace.quoting import printable
from hpcpace.rundir import Attempt

_MOST_TEXT = 500
_MOST_DTYPE = 32
_MOST_UNKNOWN = 16


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one attempt.

    Attributes:
        hosts: host names by rank.
        emulation: in what way the speed of computation was not real, as in a lab; empty where it was.
        versions: names and versions of what ran.
        dtype: type that `hpcpace train` computed in; empty of other programs.
        is_lab: whether it ran in a lab of hpcpace.
        shared_cores: whether ranks shared cores on purpose.
        imported: which tool recorded the run and what it left out, as a sentence; empty for hpcpace itself.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    emulation: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    dtype: str = ""
    is_lab: bool = False
    shared_cores: bool = False
    imported: str = ""


def read_run_record(attempt: Attempt, problems: list[str]) -> RunRecord:
    """Return what run.json says; a sentence is added to `problems` where it cannot be used."""
    return read_json(attempt, attempt.run_json.name, _record, problems) or RunRecord()


def _record(content: Any) -> RunRecord:
    return RunRecord(
        hosts=dict(_host(entry) for entry in content.get("ranks", [])),
        emulation=_text(content.get("environment", {}).get("HPCPACE_LAB_EMULATION", "")),
        versions=tuple((_text(name), _text(of)) for name, of in content.get("versions", {}).items() if of),
        dtype=model_dtype(content),
        is_lab="HPCPACE_LAB_NAME" in content.get("environment", {}),
        shared_cores=content.get("config", {}).get("train", {}).get("shared_cores") is True,
        imported=_imported(content.get("imported")),
    )


def _imported(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    unknown = [printable(_text(phrase)) for phrase in content.get("unknown", [])][:_MOST_UNKNOWN]
    tool = printable(_text(content.get("tool", "")))
    return f"recorded by {tool}" + (f"; not in its files: {', '.join(unknown)}" if unknown else "")


def model_dtype(content: Any) -> str:
    """Return the type that the content of a run.json names for the computation; empty where it names none.

    Raises:
        TypeError: it is no text.
    """
    model = content.get("model")
    # A script may record a model in words of its own.
    return printable(_text(model.get("dtype", "")))[:_MOST_DTYPE] if isinstance(model, dict) else ""


def _host(entry: Any) -> tuple[int, str]:
    from hpcpace.trace.header import MOST_RANKS  # loads numpy, which a list of runs does without

    rank = entry["rank"]
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        raise ValueError(f"a rank is {rank!r}")
    return rank, _text(entry["host"])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value[:_MOST_TEXT]
