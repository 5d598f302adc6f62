"""Whether a job hangs by its traces, and since when that counts: one limit for the report, `hang` and `watch`."""

from __future__ import annotations

from hpcpace.core.text import NS_PER_S
from hpcpace.hang.from_traces import JobRecords
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Doing, FoundHang, Hang, HangKind, JobView

USUAL_STEPS = 20
"""Usual steps that an operation must last before the job hangs."""

FIRST_STEP_S = 120.0
"""Seconds that it must last before the first step has ended, or in the first checkpoint or evaluation of a rank."""

USUAL_LENGTHS = 5
"""Usual lengths of a checkpoint or an evaluation that one may last."""

_LONG = frozenset((Doing.SAVING, Doing.EVALUATING))
_ALL_INSIDE = frozenset((HangKind.NETWORK, HangKind.PEERS_LEFT))


def hang_in(records: JobRecords, *, hang_s: float) -> FoundHang | None:
    """Return the hang that traces show, with what was known of the job then; None where it did not hang.

    Args:
        records: of all ranks.
        hang_s: seconds that an operation must last.
    """
    for at_ns in records.moments_ns():
        job = records.view(at_ns)
        if (hang := hang_now(job, hang_s=hang_s)) is not None:
            return FoundHang(hang=hang, job=job)
    return None


def hang_now(job: JobView, *, hang_s: float) -> Hang | None:
    """Return what holds a job up at the time of a view; None if nothing does, or not for long enough."""
    most_ns = least_ns(job, hang_s=hang_s)
    hang = find_hang(job, least_ns=most_ns)
    return None if hang is None or _may_have_moved(hang, job, most_ns) or _may_last(hang, job) else hang


def least_ns(job: JobView, *, hang_s: float) -> int:
    """Return how long an operation must be open for a job to hang."""
    if job.usual_step_ns is None:
        return round(max(hang_s, FIRST_STEP_S) * NS_PER_S)
    return max(round(hang_s * NS_PER_S), USUAL_STEPS * job.usual_step_ns)


def _may_have_moved(hang: Hang, job: JobView, most_ns: int) -> bool:
    """Return whether a rank that lives was last seen too soon after the hang began.

    Where all are inside an operation, that is when the last one came, until when the others waited for that one.
    """
    views = [job.ranks[rank] for rank in hang.culprits or hang.could_be or hang.waiting]
    since_ns = hang.since_ns
    if hang.kind in _ALL_INSIDE and hang.call is not None:
        place = (hang.call.channel, hang.call.seq)
        calls = (call for view in job.ranks.values() for call in view.calls if (call.channel, call.seq) == place)
        since_ns = max((call.entered_ns for call in calls if call.entered_ns is not None), default=None)
    if since_ns is None:
        return False
    return any(
        view.is_gone is False and view.seen_ns is not None and view.seen_ns - since_ns < most_ns for view in views
    )


def _may_last(hang: Hang, job: JobView) -> bool:
    """Return whether a rank that others wait for saves or evaluates, and not for much longer than it usually does."""
    for rank in hang.culprits or hang.could_be:
        view = job.ranks[rank]
        if view.doing in _LONG and view.doing_since_ns is not None:
            usual_ns = job.usual_ns.get(view.doing)
            most_ns = FIRST_STEP_S * NS_PER_S if usual_ns is None else USUAL_LENGTHS * usual_ns
            if job.now_ns - view.doing_since_ns < most_ns:
                return True
    return False
