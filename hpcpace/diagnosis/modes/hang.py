"""A hang, as the rules of `hpcpace.hang` find it: an operation that some ranks entered and that does not end."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpace.diagnosis.modes.evidence import HangEvidence
from hpcpace.diagnosis.modes.finding import DiagnosisFinding, Panels, rank_culprit
from hpcpace.hang.views import Call, FoundHang, JobView
from hpcpace.metrics.lost_operations import OpenOperation


def hang_finding(
    found: FoundHang | None, panels: Panels, opened: Sequence[OpenOperation] = ()
) -> tuple[DiagnosisFinding, ...]:
    """Return the finding on a hang; nothing without one.

    Args:
        found: the hang.
        panels: the steps.
        opened: operations that never completed or that failed: on whom the one of the hang failed in the end.
    """
    if found is None:
        return ()
    hang, job = found.hang, found.job
    hosts = {rank: view.host for rank, view in job.ranks.items()}
    return (
        DiagnosisFinding(
            evidence=_evidence(found, opened),
            loss_share=1.0,
            confidence=0.99,
            culprits=tuple(rank_culprit(rank, hosts, 1.0, (1.0, 1.0), panels) for rank in hang.culprits),
        ),
    )


def members_of(call: Call, job: JobView) -> tuple[int, ...]:
    """Return the ranks that an operation has: those of its group, or the two of a message."""
    channel = call.channel
    return job.groups[channel.group].members if channel.source < 0 else (channel.source, channel.destination)


def _evidence(found: FoundHang, opened: Sequence[OpenOperation]) -> HangEvidence:
    hang, job, call = found.hang, found.job, found.hang.call
    age_ns = 0 if hang.since_ns is None else job.now_ns - hang.since_ns
    if call is None:
        return HangEvidence(found=found, op="", age_ns=age_ns, step=-1, inside=0, absent=0, completed=0)
    place = (call.channel, call.seq)
    members = members_of(call, job)
    calls = {rank: one for rank in members for one in job.ranks[rank].calls if (one.channel, one.seq) == place}
    inside = {rank for rank, one in calls.items() if one.is_open}
    entered = {rank for rank in members if job.ranks[rank].entered.get(call.channel, 0) > call.seq}
    of_same = [one for one in opened if (one.op, one.seq) == (call.op, call.seq) and inside & set(one.inside)]
    late = max((one.late for one in of_same), key=len, default=())
    return HangEvidence(
        found=found,
        op=call.op,
        age_ns=age_ns,
        step=call.step,
        inside=len(inside),
        absent=len(members) - len(entered | inside),
        completed=len(entered - inside),
        failed=max((len(one.failed) for one in of_same), default=0),
        late=len(late),
        late_ranks=late,
    )
