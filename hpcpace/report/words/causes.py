"""What is said of the causes, on a terminal and on the page alike: significant gains and shares, readings of skew."""

from __future__ import annotations

from hpcpace.core.text import percent, rank_list
from hpcpace.diagnosis.diagnose import Mode
from hpcpace.diagnosis.summary import Causes, GainRow, OriginRow, PathRow, SensitivityRow, Summary, sum_of

# If all transfers are slow, that is their usual time: to reset one of them to it shows no gain.
_NOT_PUT_BACK = (Mode.COMMUNICATION, Mode.CONTENTION, Mode.LOCALITY)
_LEAST_SHOWN = 0.0005
_NOTABLE_SHARE = 0.1
_MOSTLY = 0.5
_LEAST_SLOPE = 0.05  # below it, even a skew as long as the transfer changes that by less than noise does


def significant_gains(summary: Summary) -> tuple[GainRow, ...]:
    """Return the what-if gains beyond chance and beyond the error of rebuilding, the largest first."""
    causes = summary.causes
    if causes is None or summary.verdict.mode in _NOT_PUT_BACK:
        return ()
    least = max(causes.rebuild_error or 0.0, _LEAST_SHOWN)
    return tuple(gain for gain in causes.gains if gain.gain_share >= least and gain.interval[0] > 0)


def gains_remark(summary: Summary) -> str:
    """Return how far the what-if gains can be trusted, or why there are none; empty if nothing was found at all."""
    causes = summary.causes
    if causes is None or causes.traced_share is None:
        return ""
    if causes.rebuild_error is None:
        return "no what-if: the steps could not be rebuilt from their operations"
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


def significant_origins(summary: Summary, most: int) -> tuple[OriginRow, ...]:
    """Return the ranks at which most waiting began, without those at which hardly any did.

    None where most of the exposed wait cannot be traced to a rank: the rest may have begun elsewhere.
    """
    causes = summary.causes
    whole = summary.shares.exposed_wait
    if causes is None or whole is None or causes.traced_share is None or whole < _LEAST_SHOWN:
        return ()
    if causes.traced_share < _MOSTLY * whole:
        return ()
    return tuple(row for row in causes.origins[:most] if row.share_of_waits >= _LEAST_SHOWN)


def origins_coverage(summary: Summary) -> str:
    """Return how much of the exposed wait is traced to ranks, as `19.6 of 19.9 % of the step`; empty without any."""
    causes, whole = summary.causes, summary.shares.exposed_wait
    if causes is None or causes.traced_share is None or whole is None or whole < _LEAST_SHOWN:
        return ""
    return f"{100 * causes.traced_share:.1f} of {percent(whole)} of the step"


def origins_remark(summary: Summary) -> str:
    """Return why most waiting began at a rank that the verdict does not name, or why that is not shown.

    Empty where both agree.
    """
    coverage, origins = origins_coverage(summary), significant_origins(summary, 1)
    if summary.causes is not None and summary.causes.origins and coverage and not origins:
        return f"where waiting began is not shown: only {coverage} could be traced to a rank"
    named = named_ranks_of(summary)
    if not origins or not named or origins[0].rank in named or origins[0].share_of_waits < _NOTABLE_SHARE:
        return ""
    first = origins[0]
    return (
        f"most waiting began at rank {first.rank}, although the verdict names {rank_list(sorted(named))}: "
        f"{_reason(summary, first, named)}"
    )


def named_ranks_of(summary: Summary) -> set[int]:
    """Return the ranks that the verdict names in any finding, those of named nodes, stages and slots included."""
    culprits = summary.verdict.culprits
    nodes = {culprit.id for culprit in culprits if culprit.kind == "node"}
    stages = {culprit.id for culprit in culprits if culprit.kind == "slot"}
    late = {
        row.rank
        for row in summary.ranks
        if row.host in nodes or row.role.partition(" ")[0] in stages or (row.excess and row.excess.is_marked)
    }
    return late | {int(culprit.id) for culprit in culprits if culprit.kind == "rank"}


def _reason(summary: Summary, first: OriginRow, named: set[int]) -> str:
    rows = {row.rank: row for row in summary.ranks}
    own, others = rows[first.rank], [rows[rank] for rank in sorted(named) if rank in rows]
    if summary.clocks.num_wrong or (summary.causes is not None and first.rank in summary.causes.suspected_ranks):
        return "its clock may be wrong, and the verdict on own work needs no common clock"
    if others and all(row.role != own.role for row in others):
        return (
            f"it has another role ({own.role}); ranks are compared with others of their own role, and roles with each "
            "other under pipeline imbalance"
        )
    away_ns = (sum_of(own.parts_ns, "checkpoint", "eval") or 0.0) if own.parts_ns is not None else 0.0
    if away_ns > own.step_ns * _LEAST_SHOWN:
        return f"the others wait for its checkpoints and evaluations ({percent(away_ns / own.step_ns)} of its steps)"
    if first.propagated_share >= _MOSTLY:
        return f"{percent(first.propagated_share)} of that reached the others through ranks that had waited for it"
    excess = f", on average {100 * own.excess.share:+.1f} % own work against its role" if own.excess else ""
    return f"it is last in some steps but not longer again and again{excess}"


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
