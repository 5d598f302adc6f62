"""The outcome of pacing in words, on a terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.core.text import format_duration, listed, percent, plural
from hpcpace.diagnosis.summary import PacingFigures

_MOST_POINTS = 4
# To remove the reason why pacing could help gains more than pacing.
_REMEDIES = {
    "polling on shared cores": "give each rank a core of its own, or let MPI leave the core while it waits "
    "(MPICH: MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1; Open MPI: --mca mpi_yield_when_idle 1)",
}


def pacing_lines(pacing: PacingFigures) -> Iterator[tuple[str, str]]:
    """Yield names and values: the outcome, both arms, where ranks were paced, and what could help."""
    yield "outcome", pacing.sentence
    if pacing.step_off_ns is not None:
        on = "not tried" if pacing.step_on_ns is None else _arm(pacing.step_on_ns, pacing.cv_on)
        yield "mean step", f"off {_arm(pacing.step_off_ns, pacing.cv_off)}; on {on}; a lower CV alone is not a gain"
    if pacing.num_pairs:
        yield "trial", f"{plural(pacing.num_pairs, 'pair')} of blocks, policy {pacing.tried}"
    if pacing.points:
        more = [f"{len(pacing.points) - _MOST_POINTS} more"] if len(pacing.points) > _MOST_POINTS else []
        yield "paced at", listed([*pacing.points[:_MOST_POINTS], *more])
    if pacing.waits_on_device:
        yield "slack", _slack(pacing)
    yield "could help", listed(pacing.mechanisms) if pacing.mechanisms else "no mechanism found: ranks only wait"
    for mechanism in pacing.mechanisms:
        if mechanism in _REMEDIES:
            yield "try first", _REMEDIES[mechanism]


def _slack(pacing: PacingFigures) -> str:
    """Return what could be gained on devices, where ranks are only observed."""
    if pacing.slack_ns is None or pacing.most_slack_ns is None or pacing.most_gain is None:
        return "not known: phases are host times of ranks with a device"
    return (
        f"{format_duration(pacing.slack_ns)} a step and rank on its device, at most "
        f"{format_duration(pacing.most_slack_ns)} (rank {pacing.most_slack_rank}); a trial could gain at most "
        f"{percent(pacing.most_gain)} of the step time, all exposed wait, and gains nothing if ranks only wait"
    )


def _arm(step_ns: float, cv: float | None) -> str:
    return format_duration(step_ns) + (f" (CV {cv:.3f})" if cv is not None else "")
