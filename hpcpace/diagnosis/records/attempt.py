"""The records of one attempt besides its traces: run.json, result.json, trial.json and probe.json."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcpace.diagnosis.records.probe import ReadProbe, read_probe_record
from hpcpace.diagnosis.records.result import ResultRecord, read_result_record
from hpcpace.diagnosis.records.run import RunRecord, read_run_record
from hpcpace.diagnosis.records.trial import read_trial_record
from hpcpace.diagnosis.summary import PacingFigures
from hpcpace.rundir import Attempt


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
