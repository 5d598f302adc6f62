"""The state of a running job as plain values, from the looks at its files.

The view shows it, `--json` prints it, and the metrics export it. Times of different ranks are never compared: each
figure is a difference on one rank's own clock, or a comparison of such differences.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, percent, printable, rank_list
from hpcpace.metrics.roles import same_work
from hpcpace.watch.live_rank import Detail, LiveRank, OpenCall
from hpcpace.watch.run_tail import LiveAttempt, RunTail

SCHEMA = "hpcpace-watch/1"


class Doing(StrEnum):
    """What a run does, as far as its files tell."""

    NOT_STARTED = "not started"
    STARTING = "starting"
    RUNNING = "running"
    HANGS = "hangs"
    SILENT = "silent"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    ENDED = "ended"
    REMOVED = "removed"


class RankDoing(StrEnum):
    """What a rank does, as far as its files tell."""

    LIVE = "live"
    SILENT = "silent"
    ENDED = "ended"
    NO_FILE = "no file"
    DAMAGED = "damaged"
    UNSEEN = "not looked at yet"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank.

    Attributes:
        doing: whether it writes.
        step: the step that it is in; -1 before the first.
        step_age_s: how long that had lasted at its last flush; None where unknown.
        silent_s: for how long it has written nothing; 0 of a live one.
        looked_s: seconds since it was looked at.
        detail_age_s: seconds since it was looked at in detail; None if it was not yet, as the next three then.
        own_ns: time per step in which it was not blocked in communication.
        blocked_ns: time per step in which it was.
        wait_ns: of that, what it was blocked longer than the least blocked rank of its role.
        excess: own time above the median of its role, relative to that; None where it cannot be compared.
        reason: what sets it apart, in words; empty if nothing does.
        phases_ns: mean time of each phase per step, by its name.
        open_calls: operations that were open at its last flush, in words.
        num_dropped: rows that it gave up while it was watched.
    """

    rank: int
    host: str
    doing: RankDoing
    step: int = -1
    step_age_s: float | None = None
    silent_s: float = 0.0
    looked_s: float = 0.0
    detail_age_s: float | None = None
    own_ns: float | None = None
    blocked_ns: float | None = None
    wait_ns: float | None = None
    excess: float | None = None
    reason: str = ""
    phases_ns: dict[str, float]
    open_calls: tuple[str, ...] = ()
    num_dropped: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """The network of one host: its busiest interface.

    Attributes:
        sent_bps, received_bps: bits per second over the last samples.
        line_bps: rate of the interface; None where unknown.
    """

    host: str
    interface: str
    sent_bps: float
    received_bps: float
    line_bps: float | None

    @property
    def share(self) -> float | None:
        """The busier direction as a share of the line rate; None where that is unknown."""
        return None if self.line_bps is None else max(self.sent_bps, self.received_bps) / self.line_bps


@dataclass(frozen=True, kw_only=True)
class HangState:
    """The hang that the records show.

    Attributes:
        kind: of the cause, in words.
        ranks: those that hold up the others, or of which one does.
        is_sure: whether `ranks` are all to blame.
        headline, why, advice: in words.
        found_s: seconds since it was found.
    """

    kind: str
    ranks: tuple[int, ...]
    is_sure: bool
    headline: str
    why: tuple[str, ...]
    advice: str
    found_s: float


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A run at one time.

    Attributes:
        path: of the run, as the user gave it.
        name, jobid, step_id, versions, mesh: what its records say; empty where they do not.
        attempt, num_attempts: which attempt this is about, -1 without any, and how many there are.
        doing: what the run does.
        world_size: number of ranks; 0 where unknown.
        num_steps: steps that all live ranks have ended.
        most_steps: steps that the first rank has ended.
        planned_steps: of the whole run; None where unknown.
        step_ns: usual step now: median of the last ones, over ranks; None before any.
        past_ns: median of all earlier usual steps of one rank of this attempt; None before there are enough.
        change: `step_ns` against `past_ns`, as a share of it; None where one is unknown.
        step_age_s: how long the present step had lasted at the last flushes, median over ranks.
        rate: steps per second, over the last ones.
        sample_rate, samples_unit: samples of all ranks per second.
        num_samples: samples of the steps that were seen, over all ranks.
        eta_s: seconds to the planned end at the mean rate so far; None where unknown.
        wait_share: mean exposed wait of a rank as a share of the step: what it was blocked longer than the least
            blocked rank of its role; None where no detail was seen.
        blocked_share: the same for all of the time blocked in communication.
        last_step_unix_s: when the last step ended, by the clock of the file system.
        halfwidth_ns: largest uncertainty of a rank's clock; None where clocks were not compared.
        num_dropped: rows that ranks gave up while they were watched.
        num_live, silent, missing, num_ended: ranks that write, that have stopped writing, that have no file, and how
            many have closed theirs.
        ranks: those with a record, ascending.
        hosts: those with network counters, by name.
        pacing: state of pacing in words; empty without it.
        hang: what holds the run up; None if nothing does.
        look_s: how long the last look took.
        looked_s: age of the oldest figure of a live rank, in seconds.
        detail_s: the same of a figure that needs detail; None without any.
        notes: what is wrong with the files or the clocks.
    """

    path: str
    doing: Doing
    name: str = ""
    jobid: str = ""
    step_id: str = ""
    versions: dict[str, str]
    mesh: str = ""
    attempt: int = -1
    num_attempts: int = 0
    world_size: int = 0
    num_steps: int = 0
    most_steps: int = 0
    planned_steps: int | None = None
    step_ns: float | None = None
    past_ns: float | None = None
    change: float | None = None
    step_age_s: float | None = None
    rate: float | None = None
    sample_rate: float | None = None
    samples_unit: str = "samples"
    num_samples: int = 0
    eta_s: float | None = None
    wait_share: float | None = None
    blocked_share: float | None = None
    last_step_unix_s: float | None = None
    halfwidth_ns: int | None = None
    num_dropped: int = 0
    num_live: int = 0
    num_ended: int = 0
    silent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    ranks: tuple[RankState, ...] = ()
    hosts: tuple[HostState, ...] = ()
    pacing: str = ""
    hang: HangState | None = None
    look_s: float = 0.0
    looked_s: float = 0.0
    detail_s: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"schema": SCHEMA, **asdict(self)}


# A flush a second, late by what a busy disk can take; as in hpcpace.diagnosis.run_state.
_FRESH_S, _FRESH_FLUSHES = 10.0, 5
_NOW_STEPS, _NOW_NS = 8, 3 * NS_PER_S
_MIN_PAST = 20
_MAX_TIMED = 64  # ranks of a synchronous job, which all take as long for a step
_MIN_EXCESS = 0.05
_MIN_WAIT = 0.05
_CLOCK_TOLERANCE_S, _JUST_S = 2.0, 2.0
_MAX_OPEN = 8
_NO_CAUSE = frozenset({"grad_sync", "pace", "other"})


def job_state(tail: RunTail, *, hang: HangState | None = None, unix_s: float | None = None) -> JobState:
    """Return what a run does now.

    Args:
        tail: after a look.
        hang: what holds the run up, if that was found.
        unix_s: time of day by this host's clock; by default now.
    """
    followed, path = tail.followed, printable(str(tail.path))
    if followed is None:
        doing = Doing.REMOVED if tail.is_removed else Doing.NOT_STARTED
        return JobState(path=path, doing=doing, versions={}, notes=tuple(tail.notes))
    unix_s = time.time() if unix_s is None else unix_s
    clock_note = _clock_note(followed, tail.now_s, unix_s)
    ages = _Ages(followed, unix_s=None if clock_note else unix_s)
    ranks = _rank_states(followed, ages, tail.now_s)
    live = [followed.ranks[one.rank] for one in ranks if one.doing == RankDoing.LIVE]
    silent = tuple(one.rank for one in ranks if one.doing == RankDoing.SILENT)
    moving = live or [one for one in followed.ranks.values() if one.steps]
    details = [one.detail for one in moving if one.detail is not None]
    return JobState(
        path=path,
        doing=_doing(tail, followed, live, silent, hang),
        attempt=followed.attempt.number,
        num_attempts=len(tail.attempts),
        wait_share=_share([one.wait_ns for one in ranks], details),
        blocked_share=_share([one.blocked_ns for one in ranks], details),
        halfwidth_ns=max((one.halfwidth_ns for one in live if one.halfwidth_ns is not None), default=None),
        num_dropped=sum(one.num_dropped for one in followed.ranks.values()),
        num_live=len(live),
        silent=silent,
        ranks=tuple(ranks),
        hosts=tuple(_host_states(followed)),
        pacing=_pacing(followed, moving),
        hang=hang,
        look_s=tail.look_s,
        looked_s=max((tail.now_s - one.looked_s for one in live), default=0.0),
        detail_s=max((tail.now_s - one.looked_s for one in details), default=None),
        notes=(*tail.notes, *([clock_note] if clock_note else []), *_notes(followed)),
        **_facts(followed),
        **_steps(followed, moving, is_moving=bool(live) and hang is None),
    )


def _facts(followed: LiveAttempt) -> dict[str, Any]:
    """Return what the records and headers of an attempt say, as fields of `JobState`."""
    header = next((one.header for one in followed.ranks.values() if one.header is not None), None)
    world_size = header.world_size if header is not None else followed.start.num_ranks
    known = followed.journals | followed.traces
    return {
        "name": followed.facts.get("name", ""),
        "jobid": followed.facts.get("jobid", "") or (printable(header.job_id) if header is not None else ""),
        "step_id": followed.facts.get("step", ""),
        "versions": {name: followed.facts.get(f"{name}_version", "") for name in ("hpcpace", "torch")},
        "mesh": printable(header.mesh) if header is not None else "",
        "samples_unit": printable(header.samples_unit) if header is not None else "samples",
        "world_size": world_size,
        "missing": tuple(rank for rank in range(world_size) if rank not in known) if known else (),
        "num_ended": len(followed.traces - followed.journals),
        "planned_steps": followed.start.planned_steps,
    }


def _steps(followed: LiveAttempt, ranks: Sequence[LiveRank], *, is_moving: bool) -> dict[str, Any]:
    """Return what the steps of some ranks show, as fields of `JobState`; the time left only where the job moves."""
    history = followed.history
    past_ns = history.usual_ns if history is not None and history.num_usual >= _MIN_PAST else None
    timed = ranks[:: -(-len(ranks) // _MAX_TIMED)] if ranks else []
    step_ns = _median(map(_now_ns, timed))
    ended = [one.steps[-1].step + 1 if one.steps else 0 for one in ranks]
    rates = [rate for one in timed if (rate := _sample_rate(one)) is not None]
    return {
        "num_steps": min(ended, default=0),
        "most_steps": max(ended, default=0),
        "step_ns": step_ns,
        "past_ns": past_ns,
        "change": None if step_ns is None or not past_ns else step_ns / past_ns - 1,
        "step_age_s": _median(None if one.step_age_ns is None else one.step_age_ns / NS_PER_S for one in ranks),
        "rate": None if not step_ns else NS_PER_S / step_ns,
        "sample_rate": statistics.fmean(rates) * len(ranks) if rates and len(rates) == len(timed) else None,
        "num_samples": sum(one.num_samples for one in followed.ranks.values()),
        "eta_s": _eta_s(followed, min(ended, default=0), step_ns) if is_moving else None,
        "last_step_unix_s": _last_step_s(followed.ranks.values()),
    }


class _Ages:
    """For how long ranks have been silent.

    A change that was seen counts by the clock of the looks. Of a journal that has not changed since the first look, the
    file system's own times count: compared with that of the rank that wrote last, and with this host's clock if the two
    clocks agree.
    """

    def __init__(self, followed: LiveAttempt, *, unix_s: float | None) -> None:
        self._newest_ns = max((one.written_ns for one in followed.ranks.values()), default=0)
        has_changed = any(one.changed_s is not None for one in followed.ranks.values())
        self._all_s = max(unix_s - self._newest_ns / NS_PER_S, 0.0) if unix_s is not None and not has_changed else 0.0

    def silent_s(self, live: LiveRank) -> float:
        """Return for how long a rank had written nothing when it was last looked at."""
        if live.changed_s is not None:
            return live.looked_s - live.changed_s
        before_s = max(self._newest_ns - live.written_ns, 0) / NS_PER_S
        return max(before_s, live.looked_s - live.first_looked_s, self._all_s + before_s)


@dataclass(frozen=True, kw_only=True)
class _Role:
    """What is usual among the ranks of one role: medians of own time and of each phase, the least time blocked.

    Of two ranks the lower one is usual, so that the slow one is held against the other and not against both.
    """

    num_ranks: int
    own_ns: float
    least_blocked_ns: float
    phases_ns: Mapping[str, float]


def _roles(followed: LiveAttempt) -> dict[int, _Role]:
    """Return the role of each rank whose header is known, as far as ranks that do the same work were looked at."""
    known = {rank: one for rank, one in followed.ranks.items() if one.header is not None}
    place = np.array([(one.header.pp, one.header.tp) for one in known.values() if one.header is not None], np.int64)
    of_rank = dict(zip(known, same_work(*place.reshape(-1, 2).T).tolist(), strict=True))
    details: dict[int, list[Detail]] = {}
    for rank, of in of_rank.items():
        if (detail := known[rank].detail) is not None:
            details.setdefault(of, []).append(detail)
    roles = {of: _role(peers) for of, peers in details.items()}
    return {rank: roles[of] for rank, of in of_rank.items() if of in roles}


def _role(details: Sequence[Detail]) -> _Role:
    names = {name for detail in details for name in detail.phases_ns}
    return _Role(
        num_ranks=len(details),
        own_ns=statistics.median_low(detail.own_ns for detail in details),
        least_blocked_ns=min(detail.blocked_ns for detail in details),
        phases_ns={
            name: statistics.median_low(detail.phases_ns.get(name, 0.0) for detail in details) for name in names
        },
    )


def _clock_note(followed: LiveAttempt, now_s: float, unix_s: float) -> str:
    """Return a sentence if the file system's clock differs from this host's; empty if not, or if that is unknown.

    A file that has a time to come shows it, and so does one that was just seen to change and has an old time.
    """
    ages_s = [unix_s - one.written_ns / NS_PER_S for one in followed.ranks.values()]
    just_s = [
        unix_s - one.written_ns / NS_PER_S
        for one in followed.ranks.values()
        if one.changed_s is not None and now_s - one.changed_s < _JUST_S
    ]
    if min(ages_s, default=0.0) < -_CLOCK_TOLERANCE_S:
        off = f"{-min(ages_s):.0f} s ahead of"
    elif min(just_s, default=0.0) > _FRESH_S:
        off = f"{min(just_s):.0f} s behind"
    else:
        return ""
    return f"the file system's clock is {off} this host's: times of files are not compared with it"


def _rank_states(followed: LiveAttempt, ages: _Ages, now_s: float) -> list[RankState]:
    fresh_s = max(_FRESH_S, _FRESH_FLUSHES * min(followed.start.flush_interval_s, _FRESH_S))
    roles = _roles(followed)
    found = []
    for rank in sorted(followed.ranks):
        one = followed.ranks[rank]
        silent_s = ages.silent_s(one) if one.header is not None else 0.0
        peers = roles.get(rank)
        if rank not in followed.journals:
            doing = RankDoing.ENDED if rank in followed.traces else RankDoing.NO_FILE
        elif one.problem:
            doing = RankDoing.DAMAGED
        elif one.header is None:
            doing = RankDoing.UNSEEN
        else:
            doing = RankDoing.SILENT if silent_s > fresh_s else RankDoing.LIVE
        found.append(_rank_state(one, doing, silent_s if silent_s > fresh_s else 0.0, peers, now_s))
    return found


def _rank_state(one: LiveRank, doing: RankDoing, silent_s: float, peers: _Role | None, now_s: float) -> RankState:
    detail, age_ns = one.detail, one.step_age_ns
    excess = None
    if detail is not None and peers is not None and peers.num_ranks > 1 and peers.own_ns:
        excess = detail.own_ns / peers.own_ns - 1
    wait_ns = None if detail is None or peers is None else max(detail.blocked_ns - peers.least_blocked_ns, 0.0)
    opened = one.open_calls
    return RankState(
        rank=one.rank,
        host=printable(one.header.host) if one.header is not None else "",
        doing=doing,
        step=one.steps[-1].step + 1 if one.steps else -1,
        step_age_s=None if age_ns is None else age_ns / NS_PER_S,
        silent_s=silent_s,
        looked_s=now_s - one.looked_s if one.looked_s else 0.0,
        detail_age_s=None if detail is None else now_s - detail.looked_s,
        own_ns=None if detail is None else detail.own_ns,
        blocked_ns=None if detail is None else detail.blocked_ns,
        wait_ns=wait_ns,
        excess=excess,
        reason=_reason(detail, peers, excess, wait_ns),
        phases_ns={} if detail is None else dict(detail.phases_ns),
        open_calls=tuple(_call_words(call, one.flushed_ns) for call in opened[:_MAX_OPEN]),
        num_dropped=one.num_dropped,
        problem=one.problem,
    )


def _reason(detail: Detail | None, peers: _Role | None, excess: float | None, wait_ns: float | None) -> str:
    """Return why a rank differs from those of its role: its own work and the phase with the most of it, or waiting."""
    if detail is None or peers is None or excess is None or wait_ns is None:
        return ""
    if excess >= _MIN_EXCESS:
        over_ns = {
            name: time_ns - peers.phases_ns.get(name, 0.0)
            for name, time_ns in detail.phases_ns.items()
            if name not in _NO_CAUSE
        }
        most = max(over_ns, key=lambda name: over_ns[name], default="")
        phase = f", {most} +{format_duration(over_ns[most])}" if most and over_ns[most] > 0 else ""
        return f"own work +{percent(excess)}{phase}"
    share = wait_ns / detail.step_ns if detail.step_ns else 0.0
    return f"waits for others, {percent(share)} of the step" if share >= _MIN_WAIT else ""


def _call_words(call: OpenCall, flushed_ns: int | None) -> str:
    since = "" if flushed_ns is None else f", for {format_duration(max(flushed_ns - call.entered_ns, 0))}"
    peer = f" with rank {call.peer}" if call.peer >= 0 else ""
    return f"{call.op} {call.seq} of group {printable(call.group)}{peer}{since}"


def _now_ns(one: LiveRank) -> float | None:
    """Return the median time from step to step of the last ones of a rank."""
    ends = [step.end_ns for step in one.steps]
    recent = [end for end in ends if end >= ends[-1] - _NOW_NS] if ends else []
    chosen = recent if len(recent) > _NOW_STEPS else ends[-_NOW_STEPS - 1 :]
    gaps = [after - before for before, after in pairwise(chosen)]
    return statistics.median(gaps) if gaps else None


def _sample_rate(one: LiveRank) -> float | None:
    steps = list(one.steps)[-_NOW_STEPS - 1 :]
    if len(steps) < 2 or steps[-1].end_ns <= steps[0].end_ns:
        return None
    return sum(step.samples for step in steps[1:]) / (steps[-1].end_ns - steps[0].end_ns) * NS_PER_S


def _eta_s(followed: LiveAttempt, num_steps: int, step_ns: float | None) -> float | None:
    """Return the time to the planned end at the mean step of this attempt so far, special steps included."""
    planned, history = followed.start.planned_steps, followed.history
    if planned is None or step_ns is None:
        return None
    mean_ns = history.mean_ns if history is not None and history.num_usual >= _MIN_PAST else step_ns
    return max(planned - num_steps, 0) * mean_ns / NS_PER_S


def _share(times_ns: Iterable[float | None], details: Sequence[Detail]) -> float | None:
    known = [time_ns for time_ns in times_ns if time_ns is not None]
    steps_ns = [detail.step_ns for detail in details]
    return statistics.fmean(known) / statistics.fmean(steps_ns) if known and steps_ns and sum(steps_ns) else None


def _last_step_s(ranks: Iterable[LiveRank]) -> float | None:
    """Return when a rank's last step ended: as long before the last write of its file as before its last flush."""
    ends = [
        (one.written_ns - max(one.flushed_ns - one.steps[-1].end_ns, 0)) / NS_PER_S
        for one in ranks
        if one.steps and one.flushed_ns is not None
    ]
    return max(ends, default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _host_states(followed: LiveAttempt) -> Iterable[HostState]:
    for one in sorted(followed.ranks.values(), key=lambda one: one.header.host if one.header is not None else ""):
        if one.header is None or len(one.network) < 2:
            continue
        (begin_ns, before), (end_ns, after) = one.network[0], one.network[-1]
        if end_ns <= begin_ns:
            continue
        rates = {}
        for number in before.keys() & after.keys():
            name = one.header.interfaces[number] if number < len(one.header.interfaces) else f"interface {number}"
            sent, received = (
                (now - then) * 8 * NS_PER_S / (end_ns - begin_ns)
                for then, now in zip(before[number], after[number], strict=True)
            )
            if name != "lo" and sent >= 0 and received >= 0:
                rates[name] = (sent, received)
        if rates:
            name = max(rates, key=lambda name: max(rates[name]))
            line_bps = followed.line_bps.get(one.header.host, {}).get(name)
            yield HostState(
                host=printable(one.header.host),
                interface=printable(name),
                sent_bps=rates[name][0],
                received_bps=rates[name][1],
                line_bps=line_bps,
            )


def _pacing(followed: LiveAttempt, ranks: Sequence[LiveRank]) -> str:
    if followed.trial:
        return followed.trial
    policy = followed.facts.get("policy", "none")
    rows = [one.pacing for one in ranks if one.pacing is not None]
    if rows:
        step, arm, _ = max(rows)
        delay_ns = max(delay_ns for last, _, delay_ns in rows if last == step)
        return f"pacing {policy}: arm {arm} at step {step}, largest delay {format_duration(delay_ns)}"
    return f"pacing {policy}: no decision yet" if policy not in ("", "none", "off") else ""


def _doing(
    tail: RunTail, followed: LiveAttempt, live: Sequence[LiveRank], silent: Sequence[int], hang: HangState | None
) -> Doing:
    if tail.is_removed:
        return Doing.REMOVED
    if followed.journals:
        if live:
            return Doing.RUNNING if hang is None else Doing.HANGS
        return Doing.SILENT if silent else Doing.STARTING
    if followed.result:
        by_outcome = {"finished": Doing.FINISHED, "stopped": Doing.STOPPED}
        return by_outcome.get(followed.result, Doing.FAILED)
    if followed.traces or followed.has_packs:
        return Doing.FAILED if followed.start.is_workload else Doing.ENDED
    return Doing.STARTING


def _notes(followed: LiveAttempt) -> Iterable[str]:
    if followed.facts.get("trace_dir") and not followed.journals and not followed.traces:
        yield f"ranks write to {followed.facts['trace_dir']} on their nodes: their traces come into the run at the end"
    sizes = Counter(one.header.world_size for one in followed.ranks.values() if one.header is not None)
    if len(sizes) > 1:
        yield f"ranks disagree on their number: {', '.join(map(str, sorted(sizes)))}"
    damaged = [one.rank for one in followed.ranks.values() if one.problem]
    if damaged:
        yield f"{rank_list(sorted(damaged))} cannot be read"
