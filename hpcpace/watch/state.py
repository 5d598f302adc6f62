"""What a run does now, as plain values: what the view shows, `--json` prints and the metrics export."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

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
