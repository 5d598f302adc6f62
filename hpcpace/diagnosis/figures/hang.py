"""The hang of a run as a program reads it from the summary."""

from __future__ import annotations

from hpcpace.diagnosis.summary import HangFigures, RankStack
from hpcpace.hang.views import FoundHang
from hpcpace.hang.words import call_name

_MOST_STACKS = 8
_MOST_FRAMES = 32
_MOST_LINKS = 16


def hang_figures(found: FoundHang | None) -> HangFigures | None:
    """Return who held up whom; None without a hang."""
    if found is None:
        return None
    hang, job, call = found.hang, found.job, found.hang.call
    views = [job.ranks[rank] for rank in hang.culprits or hang.could_be]
    return HangFigures(
        kind=str(hang.kind),
        culprits=hang.culprits,
        could_be=hang.could_be,
        waiting=hang.waiting,
        reason=hang.reason,
        operation="" if call is None else call_name(call, job),
        op="" if call is None else call.op,
        group="" if call is None else job.groups[call.channel.group].name,
        seq=-1 if call is None else call.seq,
        step=-1 if call is None else call.step,
        age_ns=None if hang.since_ns is None else job.now_ns - hang.since_ns,
        chain=tuple(call_name(each, job) for each in hang.chain[-_MOST_LINKS:]),
        stacks=tuple(RankStack(rank=view.rank, frames=view.stack[-_MOST_FRAMES:]) for view in views if view.stack)[
            :_MOST_STACKS
        ],
    )
