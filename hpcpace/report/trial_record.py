"""What a report takes from trial.json, the outcome of pacing; nothing where it is missing or foreign."""

from __future__ import annotations

import json
import math
from typing import Any

from hpcpace.report.layout import printable
from hpcpace.report.summary import PacingFigures
from hpcpace.rundir import Attempt

_MOST_BYTES = 1 << 26  # a number for each rank
_MOST_TEXT = 500


def read_trial_record(attempt: Attempt) -> PacingFigures | None:
    """Return what can be read of trial.json; None where the run was not paced."""
    path = attempt.trial_json
    try:
        # To open a FIFO would wait for a writer, and a device may have no end.
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return _figures(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError):
        return None


def _figures(content: Any) -> PacingFigures:
    trial = content["trial"] or {}
    effect = trial.get("effect") or {}
    return PacingFigures(
        policy=_text(content["policy"]),
        tried=_text(content["tried"]),
        is_on=content["is_on"] is True,
        sentence=_text(content["sentence"]),
        mechanisms=tuple(_text(name) for name in content["mechanisms"]),
        points=tuple(dict.fromkeys(_text(point["name"]) for point in content["points"])),
        outcome=_text(trial.get("outcome", "")),
        gain=_number(effect.get("mean")),
        interval=_interval(effect),
        detectable=_number(effect.get("detectable")),
        num_pairs=int(trial.get("num_pairs", 0)),
        step_off_ns=_number(trial.get("step_off_ns")),
        step_on_ns=_number(trial.get("step_on_ns")),
        cv_off=_number(trial.get("variation_off")),
        cv_on=_number(trial.get("variation_on")),
    )


def _interval(effect: Any) -> tuple[float, float] | None:
    low, high = _number(effect.get("low")), _number(effect.get("high"))
    return None if low is None or high is None else (low, high)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any) -> str:
    return printable(str(value)[:_MOST_TEXT])
