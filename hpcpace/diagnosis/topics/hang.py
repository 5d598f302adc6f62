"""A hang, as the rules of `hpcpace.hang` find it: an operation that some ranks entered and that does not end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpcpace.core.text import named_ranks
from hpcpace.diagnosis.finding import MAX_RANKS, Case, DiagnosisFinding, Evidence, FindingWords, Said, rank_culprit
from hpcpace.diagnosis.summary import Mode
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import Call, FoundHang, JobView
from hpcpace.metrics.lost_operations import OpenOperation


@dataclass(frozen=True, kw_only=True)
class HangEvidence(Evidence):
    """An operation that does not end.

    Attributes:
        found: the ranks that hold up others, and what was known of the job then.
        op: name of the operation; empty where nobody waits in one.
        age_ns: from the first enter to the time for which the hang was found: the last sign of life of the ranks
            inside, or just before the operation failed on the first one.
        step: in which it was entered; -1 where unknown.
        inside: how many ranks wait inside then.
        absent: how many members have not entered it by then.
        completed: how many ranks have completed it by then.
        failed: on how many of those inside it failed in the end, such as by a timeout.
        late: how many ranks entered it after it had failed on others.
        late_ranks: which ones.
    """

    mode: ClassVar[str] = Mode.HANG
    precedence: ClassVar[int] = 1
    needs_no_others: ClassVar[bool] = True
    found: FoundHang
    op: str
    age_ns: int
    step: int
    inside: int
    absent: int
    completed: int
    failed: int = 0
    late: int = 0
    late_ranks: tuple[int, ...] = ()

    @property
    def variety(self) -> str:
        """The operation."""
        return self.op

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        words = describe(self.found.hang, self.found.job)
        late = named_ranks(self.late_ranks[:MAX_RANKS], said.hosts)
        came = [f"{late} entered it only when it had failed on the others"] if self.late_ranks else []
        first, *more = (*came, *words.why) or ("no rank is known to wait",)
        return FindingWords(headline=words.headline, why=first, next=words.advice, more=tuple(more))


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the finding on a hang; nothing without one."""
    if case.hang is None:
        return []
    ranks = case.hang.hang.culprits
    return [
        DiagnosisFinding(
            evidence=_evidence(case.hang, case.opened),
            loss_share=1.0,
            confidence=0.99,
            culprits=tuple(rank_culprit(rank, 1.0, (1.0, 1.0), case.panels) for rank in ranks),
        )
    ]


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
