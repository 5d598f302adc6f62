"""What hosts did to ranks: stops by a signal, with a cgroup or host, by a suspend or swapping; and memory that grows.

The others wait for a stopped rank in the next collective, so a single stop may cost more than anything that recurs.
Memory that grows step by step costs nothing until none is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, plural, printable
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    first_ranks,
    place_culprit,
    rank_culprit,
    shortened,
)
from hpcpace.diagnosis.stops import GrowingMemory, SeenStop, StopScope
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.metrics.stops import StopThresholds

_MAX_SHOWN = 4  # display: stops, and ranks whose memory grows, that have a sentence
_SURE = 0.99  # statistics: a gap of samples without processor time is no matter of chance
_NOT_SURE = 0.7  # statistics: a call that keeps Python's lock looks alike in older traces


@dataclass(frozen=True, kw_only=True)
class LongStepThresholds(Thresholds, topic="stops"):
    """When a single step of a rank is mentioned although nothing shows what the rank did in it."""

    least_length: float = number(10.0, "times")
    """Own work over its median from which a step is far beyond what varying work explains."""
    others_part: float = number(0.5, "share")
    """Part of its excess that no other rank may have: else it is the job's, such as an evaluation."""


@dataclass(frozen=True, kw_only=True)
class StopEvidence(Evidence):
    """Ranks that did not run for some time.

    Attributes:
        stops: the stops, the most expensive first.
        share: of the time that all of them cost.
        length_ns, begin_unix_ns, step: length of the first one, its begin by wall-clock time (0 where unknown), and the
            step in which it began.
        num_stops: how many there are.
    """

    mode: ClassVar[str] = Mode.STOPPED
    needs_no_others: ClassVar[bool] = True
    wins_ties: ClassVar[bool] = True
    makes_steps_differ: ClassVar[bool] = True
    stops: tuple[SeenStop, ...]
    share: float
    length_ns: int
    begin_unix_ns: int
    step: int
    num_stops: int

    @property
    def variety(self) -> str:
        """Who stood still together."""
        return str(self.stops[0].scope)

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        first, *others = self.stops
        who = _who(first, said)
        for_long = f"for {format_duration(first.length_ns)}{_when(first)}"
        did = "was in one call that uses no core" if first.scope is StopScope.CALL else "did not run"
        often = f"; {plural(len(others), 'more stop')}" if others else ""
        more = [f"{_who(stop, said)}: {format_duration(stop.length_ns)}{_when(stop)}" for stop in others[:_MAX_SHOWN]]
        return FindingWords(
            headline=f"stopped: {who} {did} {for_long}{often}; costs {said.lost}",
            why=_why(first),
            next=_advice(first),
            more=tuple(more),
        )


def _who(stop: SeenStop, said: Said) -> str:
    where = shortened([printable(host) for host in stop.hosts])
    if stop.scope is StopScope.JOB:
        return f"all {len(stop.ranks)} ranks"
    if stop.scope is StopScope.HOST:
        return f"all {len(stop.ranks)} ranks of {where}"
    return first_ranks(stop.ranks, said.hosts)


def _when(stop: SeenStop) -> str:
    """Return when a stop began, in the time zone of the reader, and in which step."""
    when = ""
    if stop.begin_unix_ns:
        begin = datetime.fromtimestamp(stop.begin_unix_ns / NS_PER_S, UTC).astimezone()
        when = f" from {begin:%Y-%m-%d %H:%M:%S}"
    return f"{when} (step {stop.step})"


def _why(stop: SeenStop) -> str:
    its, it = ("its", "it") if len(stop.ranks) == 1 else ("their", "they")
    gap = f"{its} host samples have that gap, in which {it} used no processor time and waited for no core"
    if stop.scope is StopScope.CALL:
        return f"{gap}, and Python's lock was taken: another thread was inside a call that neither ends nor computes"
    also = []
    if stop.is_swapping:
        also.append("major page faults then show that the host swapped")
    if not stop.is_call_known:
        also.append("in this older trace, a call that keeps Python's lock and waits looks alike")
    elif stop.scope is StopScope.RANK and stop.is_alone:
        also.append(
            f"whether {its} host stood still with {it if it == 'it' else 'them'} cannot be told: no other rank is there"
        )
    elif stop.scope is StopScope.RANK:
        also.append("other ranks on the same host ran")
    return "; ".join([gap, *also])


_STOPPERS = "SIGSTOP (kill -STOP, a debugger, py-spy, gcore) or a frozen cgroup (cgroup.freeze, freezer.state)"
_OF_HOST = "a virtual machine that was paused or migrated (sar -u: %steal), or swapping (sar -W, dmesg -T)"
_OF_JOB = "scontrol suspend or gang scheduling (sacct -j JOB -o JobID,Suspended; PreemptMode=SUSPEND)"


def _advice(stop: SeenStop) -> str:
    where = shortened([printable(host) for host in stop.hosts])
    if stop.is_swapping:
        return f"find what filled the memory of {where} then (sar -r -W, dmesg -T), or ask for more (sbatch --mem)"
    match stop.scope:
        case StopScope.CALL:
            return "find the call (py-spy dump at such a time): a file system or device that does not answer"
        case StopScope.JOB:
            return f"look for {_OF_JOB}, or {_OF_HOST}"
        case StopScope.HOST:
            return f"look on {where} for {_OF_HOST}, {_OF_JOB}, or a frozen cgroup"
        case StopScope.RANK:
            host = f"; of a whole host, {_OF_HOST}" if stop.is_alone else ""
            return f"find out who stopped it on {where}: {_STOPPERS}{host}"


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the stops of a run as one finding; nothing where they cost less than their threshold."""
    stops = case.stops
    if stops is None or not stops.found or stops.share < case.thresholds.of(StopThresholds).least_loss_share:
        return []
    first = stops.found[0]
    evidence = StopEvidence(
        stops=stops.found,
        share=stops.share,
        length_ns=first.length_ns,
        begin_unix_ns=first.begin_unix_ns,
        step=first.step,
        num_stops=len(stops.found),
    )
    is_sure = all(stop.is_call_known for stop in stops.found[:1])
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=stops.share,
            confidence=_SURE if is_sure else _NOT_SURE,
            culprits=_culprits(stops.found, case.panels, stops.share),
        )
    ]


def _culprits(stops: Sequence[SeenStop], panels: Panels, share: float) -> tuple[Culprit, ...]:
    """Return the hosts or ranks that stood still; nobody where it was the whole job."""
    found: dict[tuple[str, str], Culprit] = {}
    for stop in stops:
        if stop.scope is StopScope.HOST:
            for host in stop.hosts:
                rows = [row for row, name in enumerate(panels.host) if name == host]
                found["node", host] = place_culprit("node", host, rows, share, (share, share), panels)
        elif stop.scope is not StopScope.JOB:
            for rank in stop.ranks:
                found["rank", str(rank)] = rank_culprit(rank, share, (share, share), panels)
    return tuple(found.values())


def long_step(case: Case) -> str:
    """Return the one step that took a rank far longer than usual, where nothing shows what the rank did, in words.

    Empty where there is none, or where samples of its counters would show a stop.
    """
    panels, limits = case.panels, case.thresholds.of(LongStepThresholds)
    if panels.host_timed or panels.step is None or panels.work_ns.size == 0:
        return ""
    usual_ns = np.median(panels.work_ns, axis=1, keepdims=True)
    excess_ns = panels.work_ns - usual_ns
    row, column = (int(index) for index in np.unravel_index(int(excess_ns.argmax()), excess_ns.shape))
    excess, usual = float(excess_ns[row, column]), float(usual_ns[row, 0])
    others = np.delete(excess_ns[:, column], row)
    is_sampled = panels.cores is not None and not np.isnan(panels.cores.running[row])
    if is_sampled or excess < limits.least_length * usual or (others > limits.others_part * excess).any():
        return ""
    if excess / max(float(panels.times_ns.sum()), 1.0) < case.settings.runtime_share:
        return ""
    who = f"rank {panels.rank[row]} on {printable(panels.host[row])}"
    return (
        f"{who} took {format_duration(excess + usual)} in step {panels.step[column]}, and {format_duration(usual)} "
        "usually; without samples of its host, whether it computed, waited or was stopped is not known"
    )


_GROWS_SURELY = 0.9  # statistics: a cache that fills during all of a run looks alike
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


def find_growth(case: Case) -> list[DiagnosisFinding]:
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
        found.append(DiagnosisFinding(evidence=evidence, loss_share=0.0, confidence=_GROWS_SURELY, culprits=culprits))
    return found
