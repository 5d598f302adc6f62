"""Memory that grows step by step: whose it is, how fast it grows, and when there is none left."""

from __future__ import annotations

from typing import ClassVar

from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable
from hpcpace.diagnosis.finding import Case, DiagnosisFinding, Evidence, FindingWords, Said, first_ranks, rank_culprit
from hpcpace.diagnosis.stops import GrowingMemory
from hpcpace.diagnosis.summary import Mode

_MAX_SHOWN = 4  # display: ranks that have a sentence
_CONFIDENCE = 0.9  # statistics: a cache that fills during all of a run looks alike
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))  # format: units
_MIN_OF_UNIT = 0.95  # display: 1,000 KiB are 0.977 MiB
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400  # format: units


@dataclass(frozen=True, kw_only=True)
class MemoryEvidence(Evidence):
    """Ranks whose memory grows steadily.

    Attributes:
        growing: the ranks, the fastest growing first.
        bytes_per_step: by how much that of the first one grows.
        last_bytes: what it has at the end of the used steps.
        full_step: the step in which the memory of its host or cgroup is used up at the latest; -1 where unknown.
        num_growing: how many grow.
    """

    mode: ClassVar[str] = Mode.MEMORY
    needs_no_others: ClassVar[bool] = True
    has_own_cause: ClassVar[bool] = True
    growing: tuple[GrowingMemory, ...]
    bytes_per_step: float
    last_bytes: float
    full_step: int
    num_growing: int

    @property
    def variety(self) -> str:
        """Whose memory it is."""
        return "device" if self.growing[0].is_of_device else "process"

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        first = self.growing[0]
        ranks = tuple(each.rank for each in self.growing)
        is_all = len(ranks) == len(said.hosts) and len(ranks) > 1
        who = f"all {len(ranks)} ranks" if is_all else first_ranks(ranks, said.hosts)
        what = "device memory" if first.is_of_device else "memory"
        up_to = "up to " if len(ranks) > 1 else ""
        by = f"{up_to}{_size(first.bytes_per_step)} a step"
        host = printable(said.hosts.get(first.rank, ""))
        full = ""
        if first.full_step >= 0:
            full = f"; {_size(first.limit_bytes)} of {host} are full at step ~{first.full_step:,} at the latest"
        sizes = [
            f"rank {each.rank}: {_size(each.first_bytes)} to {_size(each.last_bytes)} in these steps"
            for each in self.growing[:_MAX_SHOWN]
        ]
        in_time = [f"at this speed, that is in {_time(first.full_s)}"] if first.full_step >= 0 else []
        files = ["pages of mapped files may be in it: this older trace does not tell"] if first.may_be_files else []
        return FindingWords(
            headline=f"memory grows: {what} of {who} by {by}{full}",
            why="; ".join([*sizes, *in_time, *files, "it grows all the time, neither in jumps nor as a warm-up does"]),
            next="look for what is kept from each step: losses that are added up without .item() or .detach(), lists, "
            "caches"
            + (
                "; torch.cuda.memory._record_memory_history() shows who allocates"
                if first.is_of_device
                else "; tracemalloc or memray shows who allocates"
            ),
        )


def _size(size_bytes: float) -> str:
    unit, name = next((one for one in _UNITS if size_bytes >= _MIN_OF_UNIT * one[0]), _UNITS[-1])
    size = size_bytes / unit
    return f"{size:,.0f} {name}" if size >= 100 else f"{size:.3g} {name}"


def _time(time_s: float) -> str:
    for length_s, name in ((_DAY_S, "day"), (_HOUR_S, "hour"), (_MINUTE_S, "minute")):
        if time_s >= 2 * length_s:
            return plural(round(time_s / length_s), name)
    return plural(round(time_s), "second")


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the ranks whose memory grows, as a finding for each kind of memory; it costs nothing until it is full."""
    found = []
    for is_of_device in (False, True):
        growing = tuple(each for each in case.memory if each.is_of_device == is_of_device)
        if not growing:
            continue
        first = growing[0]
        evidence = MemoryEvidence(
            growing=growing,
            bytes_per_step=first.bytes_per_step,
            last_bytes=first.last_bytes,
            full_step=first.full_step,
            num_growing=len(growing),
        )
        is_everywhere = len(growing) == len(case.panels.rank)
        culprits = (
            () if is_everywhere else tuple(rank_culprit(each.rank, 0.0, (0.0, 0.0), case.panels) for each in growing)
        )
        found.append(DiagnosisFinding(evidence=evidence, loss_share=0.0, confidence=_CONFIDENCE, culprits=culprits))
    return found
