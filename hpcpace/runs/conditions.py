"""What a run was started with, from run.json: work, settings, software and environment, as flat text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpcpace.core.codec import read_json
from hpcpace.core.rundir import Attempt
from hpcpace.runs.dates import is_to_come

_MOST_TEXT = 200
_MOST_VALUES = 2000
# New in every run, or said elsewhere.
_VARIABLES_OF_A_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NAME")
_OPTIONS_OF_A_RUN = ("--run-dir", "--trace-dir")
_NOT_OF_THE_WORK = ("dtype",)  # the same work, done in another precision


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a run was started with; empty where it is not recorded.

    Attributes:
        name: of the run.
        job_name: of its Slurm job, else that of the run.
        begun_unix_ns: when it began; 0 where unknown.
        work: what was trained on what, by name: other work cannot be compared.
        settings: hpcpace's own, by name.
        versions: of the software, the kernel included.
        environment: the variables that run.json keeps.
        command: that started a rank, without the options that say where the run is written.
        commit: of the working directory.
        dtype: in which the training computed.
        tool: that recorded the run, where it is not hpcpace.
    """

    name: str = ""
    job_name: str = ""
    begun_unix_ns: int = 0
    work: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    commit: str = ""
    dtype: str = ""
    tool: str = ""


def read_conditions(attempt: Attempt, problems: list[str]) -> Conditions:
    """Return what run.json says; a sentence is added to `problems` where it, or its date, cannot be used."""
    found = read_json(attempt, attempt.run_json.name, _conditions, problems) or Conditions()
    if not is_to_come(found.begun_unix_ns):
        return found
    problems.append(f"{attempt.run_json}: the date at which it began is to come, and is left out: its clock was wrong")
    return replace(found, begun_unix_ns=0)


def _conditions(content: Any) -> Conditions:
    model, data = content.get("model"), content.get("data")
    environment = dict(_flat(content.get("environment", {})))
    work = {name: value for name, value in _flat({"model": model, "data": data}) if value}
    name, kernel, imported = _text(content.get("name", "")), _text(content.get("kernel", "")), content.get("imported")
    return Conditions(
        name=name,
        job_name=environment.get("SLURM_JOB_NAME", "") or name,
        begun_unix_ns=_unix_ns(content.get("created_unix_ns", 0)),
        work={key: value for key, value in work.items() if key.rpartition(".")[2] not in _NOT_OF_THE_WORK},
        settings=dict(_flat(content.get("config", {}))),
        # Those of an imported run are of where it was imported.
        versions={} if imported else {**dict(_flat(content.get("versions", {}))), "kernel": kernel},
        environment={key: value for key, value in environment.items() if key not in _VARIABLES_OF_A_RUN},
        command=" ".join(_without_folders([_text(word) for word in content.get("command", [])])),
        commit=_text(content.get("git_commit", "")),
        dtype=work.get("model.dtype", ""),
        tool=_text(imported.get("tool", "")) if isinstance(imported, dict) else "",
    )


def _without_folders(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command but for `_OPTIONS_OF_A_RUN` and their values."""
    rest = iter(words)
    for word in rest:
        option, is_joined, _ = word.partition("=")
        if option not in _OPTIONS_OF_A_RUN:
            yield word
        elif not is_joined:
            next(rest, None)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each single value as text with its path."""
    budget = [_MOST_VALUES]
    yield from _values(value, path, budget)


def _values(value: Any, path: str, budget: list[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(item, f"{path}.{key}" if path else str(key), budget)
    elif budget[0]:
        budget[0] -= 1
        yield path[:_MOST_TEXT], "" if value is None else _text(value)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else str(value))[:_MOST_TEXT]


def _unix_ns(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
