"""What a report takes from trial.json, the outcome of pacing; nothing where it is missing or foreign."""

from __future__ import annotations

import math
from typing import Any

from hpcpace.diagnosis.summary import PacingFigures
from hpcpace.json_files import read_json
from hpcpace.quoting import printable
from hpcpace.rundir import Attempt

_MOST_TEXT = 500
_MOST_NAMES = 64


def read_trial_record(attempt: Attempt, problems: list[str]) -> PacingFigures | None:
    """Return what trial.json says; None where the run was not paced.

    A sentence is added to `problems` where it cannot be used.
    """
    return read_json(attempt, attempt.trial_json.name, _figures, problems)


def _figures(content: Any) -> PacingFigures:
    trial = content["trial"] or {}
    effect = trial.get("effect") or {}
    return PacingFigures(
        policy=_text(content["policy"]),
        tried=_text(content["tried"]),
        is_on=content["is_on"] is True,
        sentence=_text(content["sentence"]),
        mechanisms=tuple(_text(name) for name in content["mechanisms"][:_MOST_NAMES]),
        points=tuple(dict.fromkeys(_text(point["name"]) for point in content["points"][:_MOST_NAMES])),
        outcome=_text(trial.get("outcome", "")),
        gain=_number(effect.get("mean")),
        interval=_interval(effect),
        detectable=_number(effect.get("detectable")),
        num_pairs=_count(trial.get("num_pairs", 0)),
        step_off_ns=_number(trial.get("step_off_ns")),
        step_on_ns=_number(trial.get("step_on_ns")),
        cv_off=_number(trial.get("variation_off")),
        cv_on=_number(trial.get("variation_on")),
        waits_on_device=(content.get("facts") or {}).get("waits_on_device") is True,
    )


def _interval(effect: Any) -> tuple[float, float] | None:
    low, high = _number(effect.get("low")), _number(effect.get("high"))
    return None if low is None or high is None else (low, high)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    return printable(str(value)[:_MOST_TEXT])
