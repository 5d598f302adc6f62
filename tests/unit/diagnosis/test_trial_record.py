"""trial.json in a report: read as it is written, and nothing of what is damaged or foreign."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.rundir import Attempt, write_json
from hpcpace.diagnosis.records import read_trial_record
from hpcpace.pace.choice import PacingPoint
from hpcpace.pace.pacer import PacingRecord
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import Trial
from hpcpace.report.sections.causes import pacing_lines
from hpcpace.trace.schema import PaceArm


def _written(tmp_path: Path, *, num_windows: int = 200) -> Attempt:
    trial = Trial(PaceSettings(policy="slack", aa_pairs=2), seed=1)
    for window in range(num_windows):
        if trial.is_over:
            break
        is_on = trial.next_window() == PaceArm.ON
        trial.add_window([1e8 * (1 + 0.001 * (window % 3)) * (0.9 if is_on else 1.0)] * 10)
    record = PacingRecord(policy="auto", tried="slack", mechanisms=["polling on shared cores"])
    record.points = [PacingPoint(name="backward 0", ranks=(0, 1), wait_ns=5.0)]
    record.trial = trial.result()
    write_json(tmp_path / "trial.json", record.to_json())
    return Attempt(tmp_path)


def test_what_a_job_writes_is_read(tmp_path: Path) -> None:
    found = read_trial_record(_written(tmp_path), [])
    assert found is not None
    assert (found.policy, found.tried, found.outcome, found.is_on) == ("auto", "slack", "gain", True)
    assert found.gain == pytest.approx(0.105, abs=0.01)
    assert found.interval is not None and found.interval[0] < found.gain < found.interval[1]
    assert found.num_pairs == 6
    assert found.step_on_ns == pytest.approx(0.9 * found.step_off_ns, rel=0.01)
    assert found.points == ("backward 0",)


def test_both_arms_stand_beside_each_other(tmp_path: Path) -> None:
    found = read_trial_record(_written(tmp_path), [])
    assert found is not None
    lines = dict(pacing_lines(found))
    assert lines["outcome"].startswith("pacing on: slack is faster (+10.")
    assert lines["mean step"].startswith("off 100 ms (CV 0.001); on 90.")
    assert lines["trial"] == "6 pairs of blocks, policy slack"
    assert lines["could help"] == "polling on shared cores"
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD=1" in lines["try first"]


def test_a_trial_that_has_hardly_begun_is_read(tmp_path: Path) -> None:
    found = read_trial_record(_written(tmp_path, num_windows=1), [])
    assert found is not None and found.outcome == "running"
    assert found.gain is None and found.interval is None and found.step_on_ns is None
    assert "mean step" not in dict(pacing_lines(found))


@each_case(
    "change",
    [
        {"trial": 7},
        {"trial": {"effect": {"mean": "much"}}},
        {"points": [1]},
        {"points": None},
        {"mechanisms": 3},
        {"trial": {"num_pairs": "many"}},
    ],
)
def test_a_file_of_another_shape_tells_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    attempt = _written(tmp_path)
    attempt.trial_json.write_text(json.dumps(json.loads(attempt.trial_json.read_text()) | change))
    assert read_trial_record(attempt, []) is None


@each_case("content", [None, "", "[]", "7", "{}", "[" * 99999])
def test_a_file_that_is_missing_or_foreign_tells_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "trial.json").write_text(content)
    assert read_trial_record(Attempt(tmp_path), []) is None


def test_a_pipe_in_its_place_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trial.json")
    assert read_trial_record(Attempt(tmp_path), []) is None


def test_texts_that_could_steer_a_terminal_are_escaped(tmp_path: Path) -> None:
    attempt = _written(tmp_path)
    content = json.loads(attempt.trial_json.read_text()) | {"sentence": "\x1b[2J", "policy": "x" * 9999}
    attempt.trial_json.write_text(json.dumps(content))
    found = read_trial_record(attempt, [])
    assert found is not None
    assert found.sentence == "\\x1b[2J" and len(found.policy) == 500


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    attempt = _written(tmp_path)
    content = json.loads(attempt.trial_json.read_text())
    content["trial"]["step_on_ns"] = float("nan")
    attempt.trial_json.write_text(json.dumps(content))
    found = read_trial_record(attempt, [])
    assert found is not None and found.step_on_ns is None
