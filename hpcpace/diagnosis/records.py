"""The records of an attempt: run.json, result.json, trial.json and probe.json.

run.json knows ranks without a trace, too. A record that is missing or foreign leaves its fields empty; one that cannot
be used adds a sentence to the problems of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpace.core.codec import Text, as_count, as_text, convert, decoder, read_json
from hpcpace.core.errors import ProbeError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import printable
from hpcpace.diagnosis.run_state import ImportedContent, RunContent
from hpcpace.diagnosis.summary import PacingFigures, RankMemory

if TYPE_CHECKING:
    from hpcpace.probe.record import ProbeRecord

_MAX_TEXT, _MAX_REASON, _MAX_UNKNOWN, _MAX_NAMES = 500, 200, 16, 64  # display: letters, and names of records
_MAX_BYTES = 1 << 26  # memory: a loss a step, of two million


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
    return read_json(attempt, attempt.run_json.name, _run, problems) or RunRecord()


def _run(content: Any) -> RunRecord:
    found = convert(content, RunContent)
    return RunRecord(
        hosts={one.rank: one.host for one in found.ranks},
        emulation=as_text(found.environment.get("HPCPACE_LAB_EMULATION", "")),
        versions=tuple((name, of) for name, of in found.versions.items() if of),
        dtype=found.dtype,
        is_lab="HPCPACE_LAB_NAME" in found.environment,
        shared_cores=found.config.train.shared_cores is True,
        imported="" if found.imported is None else _imported(found.imported),
    )


def _imported(content: ImportedContent) -> str:
    unknown = ", ".join(map(printable, content.unknown[:_MAX_UNKNOWN]))
    return f"recorded by {printable(content.tool)}" + (f"; not in its files: {unknown}" if unknown else "")


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """The end of a training.

    Attributes:
        outcome: finished, stopped or out of memory; empty where it is not known.
        cause: the words of the error where memory was not enough.
        peak_memory: the most that each rank had, as far as they reported it.
    """

    outcome: Text = ""
    cause: Text = ""
    peak_memory: tuple[RankMemory, ...] = ()

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """The most that each rank had, ascending by rank."""
        return tuple(sorted(self.peak_memory, key=lambda row: row.rank))


def read_result_record(attempt: Attempt, problems: list[str]) -> ResultRecord:
    """Return what result.json says; a sentence is added to `problems` where it cannot be used."""
    name = attempt.result_json.name
    return read_json(attempt, name, decoder(ResultRecord), problems, most_bytes=_MAX_BYTES) or ResultRecord()


def read_trial_record(attempt: Attempt, problems: list[str]) -> PacingFigures | None:
    """Return what trial.json says; None where the run was not paced.

    A sentence is added to `problems` where it cannot be used.
    """
    return read_json(attempt, attempt.trial_json.name, _figures, problems)


def _figures(content: Any) -> PacingFigures:
    trial = content["trial"] or {}
    effect = trial.get("effect") or {}
    return PacingFigures(
        policy=_printable(content["policy"]),
        tried=_printable(content["tried"]),
        is_on=content["is_on"] is True,
        sentence=_printable(content["sentence"]),
        mechanisms=tuple(_printable(name) for name in content["mechanisms"][:_MAX_NAMES]),
        points=tuple(dict.fromkeys(_printable(point["name"]) for point in content["points"][:_MAX_NAMES])),
        outcome=_printable(trial.get("outcome", "")),
        gain=_finite(effect.get("mean")),
        interval=_interval(effect),
        detectable=_finite(effect.get("detectable")),
        num_pairs=as_count(trial.get("num_pairs", 0)),
        step_off_ns=_finite(trial.get("step_off_ns")),
        step_on_ns=_finite(trial.get("step_on_ns")),
        cv_off=_finite(trial.get("variation_off")),
        cv_on=_finite(trial.get("variation_on")),
        waits_on_device=(content.get("facts") or {}).get("waits_on_device") is True,
    )


def _interval(effect: Any) -> tuple[float, float] | None:
    low, high = _finite(effect.get("low")), _finite(effect.get("high"))
    return None if low is None or high is None else (low, high)


def _finite(value: Any) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _printable(value: Any) -> str:
    return printable(str(value)[:_MAX_TEXT])


@dataclass(frozen=True, kw_only=True)
class ReadProbe:
    """A saved probe, and the file that it came from."""

    source: str
    record: ProbeRecord


def read_probe_file(path: Path) -> ReadProbe:
    """Return the probe in a file.

    Raises:
        ProbeError: it cannot be read, or is no probe.
    """
    from hpcpace.probe.record import read_probe

    return ReadProbe(source=printable(str(path)), record=read_probe(path))


def read_probe_record(attempt: Attempt, problems: list[str]) -> ReadProbe | None:
    """Return the probe that was saved with an attempt; a sentence is added to `problems` where it cannot be used."""
    name = attempt.probe_json.name
    try:
        with attempt.open() as folder:
            if not folder.has(name):
                return None
            from hpcpace.probe.record import MAX_BYTES, probe_from  # takes longer to load than a small run to read

            content = folder.read(name, most_bytes=MAX_BYTES)
        return ReadProbe(source=name, record=probe_from(content, name))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ProbeError as error:
        reason = str(error)
    problems.append(f"{attempt.probe_json} is left out ({printable(reason)[:_MAX_REASON]})")
    return None


@dataclass(frozen=True, kw_only=True)
class AttemptRecords:
    """What the records of an attempt say; empty where they are missing or cannot be used.

    Attributes:
        run: from run.json.
        result: from result.json.
        pacing: from trial.json; None if the run was not paced.
        probe: from probe.json; None if the hosts were not probed with it.
        problems: one sentence for each record that cannot be used.
    """

    run: RunRecord = field(default_factory=RunRecord)
    result: ResultRecord = field(default_factory=ResultRecord)
    pacing: PacingFigures | None = None
    probe: ReadProbe | None = None
    problems: tuple[str, ...] = ()


def read_records(attempt: Attempt) -> AttemptRecords:
    """Read the records of an attempt."""
    problems: list[str] = []
    run, result = read_run_record(attempt, problems), read_result_record(attempt, problems)
    pacing, probe = read_trial_record(attempt, problems), read_probe_record(attempt, problems)
    return AttemptRecords(run=run, result=result, pacing=pacing, probe=probe, problems=tuple(problems))
