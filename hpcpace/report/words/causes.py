"""What is said of the causes, on a terminal and on the page alike: significant gains and shares, readings of skew."""

from __future__ import annotations

from hpcpace.diagnosis.diagnose import Mode
from hpcpace.diagnosis.summary import Causes, GainRow, OriginRow, PathRow, SensitivityRow, Summary
from hpcpace.wording import percent

# If all transfers are slow, that is their usual time: to reset one of them to it shows no gain.
_NOT_PUT_BACK = (Mode.COMMUNICATION, Mode.CONTENTION, Mode.LOCALITY)
_LEAST_SHOWN = 0.0005
_LEAST_SLOPE = 0.05  # below it, even a skew as long as the transfer changes that by less than noise does


def significant_gains(summary: Summary) -> tuple[GainRow, ...]:
    """Return the what-if gains beyond chance and beyond the error of rebuilding, the largest first."""
    causes = summary.causes
    if causes is None or summary.verdict.mode in _NOT_PUT_BACK:
        return ()
    least = max(causes.rebuild_error or 0.0, _LEAST_SHOWN)
    return tuple(gain for gain in causes.gains if gain.gain_share >= least and gain.interval[0] > 0)


def gains_remark(summary: Summary) -> str:
    """Return how far the what-if gains can be trusted, or why there are none; empty if steps were not rebuilt."""
    causes = summary.causes
    if causes is None or causes.rebuild_error is None:
        return ""
    if summary.verdict.mode in _NOT_PUT_BACK:
        mode = summary.verdict.mode
        return f"no what-if: it resets one thing to its usual time, and here the usual time is slow ({mode})"
    size = percent(causes.rebuild_error) if causes.rebuild_error >= _LEAST_SHOWN else "less than 0.1 %"
    steps = summary.steps
    some = f" ({steps.num_apart} of {steps.num_used})" if steps.num_apart < steps.num_used else ""
    error = f"steps rebuilt from their operations{some} are wrong by {size}"
    if not significant_gains(summary):
        return f"no single change would shorten the step: everything takes its usual time ({error})"
    return f"{error}: ignore smaller gains; gains are not additive"


def significant_origins(causes: Causes, most: int) -> tuple[OriginRow, ...]:
    """Return the ranks at which most waiting began, without those at which hardly any did."""
    return tuple(row for row in causes.origins[:most] if row.share_of_waits >= _LEAST_SHOWN)


def significant_path(causes: Causes, most: int) -> tuple[PathRow, ...]:
    """Return the largest parts of the critical path, without negligible ones."""
    return tuple(row for row in causes.path[:most] if row.share >= _LEAST_SHOWN)


def skew_reading(row: SensitivityRow) -> str:
    """Return what the slope of transfer over skew means."""
    low, high = row.interval
    if high < -_LEAST_SLOPE:
        return "longer when together: contention"
    if low > _LEAST_SLOPE:
        return "longer when apart"
    return "no dependence seen"
