"""One rank of a running job, as the looks at its journal have shown it so far.

Times are on the rank's own clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.metrics.communication import union_ns
from hpcpace.trace.journal import JournalTail, Tail
from hpcpace.trace.schema import Op, PaceArm, Phase, StepFlag, TraceHeader

LIGHT = ("steps", "account", "clock", "network", "pacing", "groups")
"""Tables that every look reads."""
DETAIL = ("phases", "collectives")
"""Tables that are read of ranks looked at in detail; they have nearly all the rows."""

_STEPS_KEPT, _SAMPLES_KEPT = 64, 16
_MAX_OPEN = 256
_MAX_BUFFERED = 100_000
_MAX_NS = 1 << 60
_FROM_FIRST = -1
_BARE = StepFlag.PLAIN | StepFlag.UNPHASED
_MIN_BLENDED, _BLENDED_NS = 4, 10_000_000_000
_KEY = ("group", "seq", "op", "peer", "enter_ns")


class LiveStep(NamedTuple):
    """A step that has ended."""

    step: int
    begin_ns: int
    end_ns: int
    samples: int
    flags: int


class OpenCall(NamedTuple):
    """An operation that was entered and not completed at the last flush."""

    op: str
    group: str
    seq: int
    peer: int
    entered_ns: int


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Where the last steps of a rank went that were looked at in detail.

    Attributes:
        looked_s: when that was, by the clock of the looks.
        num_steps: steps looked at.
        step_ns: mean length of these steps.
        blocked_ns: of it, how long the rank was blocked in communication.
        phases_ns: mean time of each phase per step, by its name.
    """

    looked_s: float
    num_steps: int
    step_ns: float
    blocked_ns: float
    phases_ns: dict[str, float]

    @property
    def own_ns(self) -> float:
        """Time per step in which the rank was not blocked in communication."""
        return max(self.step_ns - self.blocked_ns, 0.0)


class LiveRank:
    """What is known of one rank.

    Attributes:
        header: what its journal says of it; None before the first look.
        looked_s, first_looked_s, changed_s: when it was looked at last and first, and when it was first seen changed
            after that (None: never), by the clock of the looks.
        written_ns: when its journal was written last, Unix time by the clock of its file system.
        steps: its last steps, the oldest first.
        flushed_ns: time of its last flush.
        first_flushed_ns: time of the first flush that was seen.
        num_dropped: rows that it gave up in the flushes that were seen.
        halfwidth_ns: uncertainty of its clock at the last comparison; None without one.
        network: counters of its interfaces (num_interfaces, 2), sent and received bytes, by time.
        pacing: step, arm and delay of its last pacing decision; None without one.
        detail: where its last steps went; None if it was not looked at in detail yet.
        num_samples: samples of the steps that were seen.
        problem: why it cannot be read; empty if it can.
    """

    def __init__(self, rank: int, tail: JournalTail) -> None:
        self.rank = rank
        self.tail = tail
        self.header: TraceHeader | None = None
        self.looked_s = self.first_looked_s = 0.0
        self.changed_s: float | None = None
        self.written_ns = 0
        self.steps: deque[LiveStep] = deque(maxlen=_STEPS_KEPT)
        self.flushed_ns: int | None = None
        self.first_flushed_ns: int | None = None
        self.halfwidth_ns: int | None = None
        self.network: deque[tuple[int, dict[int, tuple[int, int]]]] = deque(maxlen=_SAMPLES_KEPT)
        self.pacing: tuple[int, str, int] | None = None
        self.detail: Detail | None = None
        self.problem = ""
        self.num_samples = 0
        self._dropped_before = self._dropped_last = 0
        self._groups: dict[int, str] = {}
        self._open: dict[tuple[int, ...], NDArray[np.void]] = {}
        self._detail_from_ns: int | None = None
        self._buffered: dict[str, list[NDArray[np.void]]] = {name: [] for name in DETAIL}

    @property
    def num_dropped(self) -> int:
        """Rows given up in the flushes that were seen."""
        return self._dropped_before + self._dropped_last

    @property
    def is_in_detail(self) -> bool:
        """Whether its rows of phases and operations are being collected."""
        return self._detail_from_ns is not None

    @property
    def step_age_ns(self) -> int | None:
        """How long its step had lasted at its last flush; None if no flush or no begin was seen."""
        begin_ns = self.steps[-1].end_ns if self.steps else self.first_flushed_ns
        return None if self.flushed_ns is None or begin_ns is None else max(self.flushed_ns - begin_ns, 0)

    @property
    def open_calls(self) -> list[OpenCall]:
        """Operations that were open at its last flush, the oldest first."""
        names = [op.name.lower() for op in Op]
        calls = [
            OpenCall(
                op=names[row["op"]] if row["op"] < len(names) else f"operation {row['op']}",
                group=self._groups.get(int(row["group"]), str(row["group"])),
                seq=int(row["seq"]),
                peer=int(row["peer"]),
                entered_ns=int(row["enter_ns"]),
            )
            for row in self._open.values()
        ]
        return sorted(calls, key=lambda call: call.entered_ns)

    @property
    def has_open(self) -> bool:
        """Whether operations may be open."""
        return bool(self._open)

    def name_groups(self, names: dict[int, str]) -> None:
        """Take the names of its process groups, by number."""
        self._groups = names | self._groups

    @property
    def lacks_names(self) -> bool:
        """Whether operations are open in groups whose names are not known."""
        return any(key[0] not in self._groups for key in self._open)

    def begin_detail(self) -> None:
        """Collect the rows of phases and operations from now on."""
        if self._detail_from_ns is None:
            self._detail_from_ns = _FROM_FIRST if self.flushed_ns is None else self.flushed_ns

    def end_detail(self) -> None:
        """Collect no more."""
        self._detail_from_ns = None
        self._buffered = {name: [] for name in DETAIL}

    def take(self, tail: Tail, now_s: float) -> list[LiveStep]:
        """Take what a look has found; return the steps that are new.

        Args:
            tail: of its journal.
            now_s: time of the look.
        """
        if self.header is None:
            self.first_looked_s = now_s
        elif tail.has_changed:
            self.changed_s = now_s
        self.header, self.looked_s, self.written_ns, self.problem = tail.header, now_s, tail.written_ns, ""
        self._take_flushes(tail)
        new = self._take_steps(tail.rows.get("steps"))
        for row in tail.rows.get("groups", ()):
            self._groups.setdefault(int(row["id"]), row["name"].decode("utf-8", "backslashreplace"))
        clock = tail.rows.get("clock")
        if clock is not None:
            self.halfwidth_ns = int(clock["halfwidth_ns"][-1])
        pacing = tail.rows.get("pacing")
        if pacing is not None:
            last = pacing[-1]
            arm = PaceArm(last["arm"]).name.lower() if last["arm"] in PaceArm._value2member_map_ else "unknown"
            self.pacing = int(last["step"]), arm, int(last["delay_ns"])
        self._take_network(tail.rows.get("network"))
        self._take_open(tail)
        if self._detail_from_ns is not None:
            self._take_detail(tail, new, now_s)
        return new

    def _take_flushes(self, tail: Tail) -> None:
        if tail.amended_account is not None:
            self._dropped_last = int(tail.amended_account["dropped"][0])
        rows = tail.rows.get("account")
        if rows is None:
            return
        self._dropped_before += self._dropped_last + int(rows["dropped"][:-1].sum())
        self._dropped_last = int(rows["dropped"][-1])
        self.flushed_ns = int(rows["time_ns"].max())
        if self.first_flushed_ns is None:
            self.first_flushed_ns = int(rows["time_ns"].min())

    def _take_steps(self, rows: NDArray[np.void] | None) -> list[LiveStep]:
        if rows is None:
            return []
        new = []
        for row in rows[-_STEPS_KEPT:].tolist():
            begin_ns, end_ns = row[1], row[2]
            if len(row) > 6 and row[5] and row[6]:  # when the device was there
                begin_ns, end_ns = row[5], row[6]
            is_plausible = row[0] >= 0 and -_MAX_NS < begin_ns <= end_ns < _MAX_NS and 0 <= row[3] < _MAX_NS
            if is_plausible and (not self.steps or row[0] > self.steps[-1].step):
                new.append(LiveStep(row[0], begin_ns, end_ns, row[3], row[4]))
                self.steps.append(new[-1])
                self.num_samples += row[3]
        return new

    def _take_network(self, rows: NDArray[np.void] | None) -> None:
        for row in () if rows is None else rows[-64 * _SAMPLES_KEPT :].tolist():
            if not self.network or self.network[-1][0] != row[0]:
                self.network.append((row[0], {}))
            self.network[-1][1][row[1]] = row[2], row[3]

    def _take_open(self, tail: Tail) -> None:
        """Keep which operations are open: those of finished steps, and those that have completed, are not."""
        if tail.open_rows is not None:
            for row in tail.open_rows[-_MAX_OPEN:].copy():
                self._open[tuple(int(row[name]) for name in _KEY)] = row
        if not self._open:
            return
        done = tail.rows.get("collectives")
        if done is not None:
            for key in zip(*(done[name].tolist() for name in _KEY), strict=True):
                self._open.pop(key, None)
        last = self.steps[-1].step if self.steps else -1
        self._open = {key: row for key, row in list(self._open.items())[-_MAX_OPEN:] if row["step"] > last}

    def _take_detail(self, tail: Tail, new: list[LiveStep], now_s: float) -> None:
        assert self._detail_from_ns is not None
        for name, rows in self._buffered.items():
            if name in tail.rows:
                rows.append(tail.rows[name])
        if self._detail_from_ns == _FROM_FIRST:
            self._begin_after_first()
        whole = [step for step in new if step.begin_ns >= self._detail_from_ns and not step.flags & _BARE]
        if not whole:
            if sum(len(part) for rows in self._buffered.values() for part in rows) > _MAX_BUFFERED:
                self.end_detail()
            return
        phases, calls = (np.concatenate(rows) if rows else None for rows in self._buffered.values())
        first, last = whole[0].step, whole[-1].step
        found = _detail(whole, _of_steps(phases, first, last), _of_steps(calls, first, last), now_s)
        self.detail = found if self.detail is None else _blended(self.detail, found)
        self._buffered = {
            name: [] if rows is None else [rows[rows["step"] > last]]
            for name, rows in zip(DETAIL, (phases, calls), strict=True)
        }

    def _begin_after_first(self) -> None:
        """Let the first look count from the first step of which all rows were read: those before are in other files."""
        firsts = [int(rows["step"].min()) for parts in self._buffered.values() for rows in parts if len(rows)]
        before = [step.end_ns for step in self.steps if step.step <= max(firsts, default=-1)]
        if self.steps:
            self._detail_from_ns = max(before, default=self.steps[0].end_ns)


def _of_steps(rows: NDArray[np.void] | None, first: int, last: int) -> NDArray[np.void] | None:
    return None if rows is None else rows[(rows["step"] >= first) & (rows["step"] <= last)]


def _detail(
    steps: list[LiveStep], phases: NDArray[np.void] | None, calls: NDArray[np.void] | None, now_s: float
) -> Detail:
    """Return where whole steps of a rank went.

    Blocked is the union of the waits of operations and of phase grad_sync, in which DDP waits by itself.
    """
    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    phases_ns: dict[str, float] = {}
    if phases is not None and len(phases):
        begin_ns, end_ns = _interval(phases)
        times_ns = np.bincount(phases["phase"], weights=np.clip(end_ns - begin_ns, 0, _MAX_NS))
        phases_ns = {phase.name.lower(): times_ns[phase] / len(steps) for phase in Phase if phase < len(times_ns)}
        phases_ns = {name: time_ns for name, time_ns in phases_ns.items() if time_ns}
        is_sync = phases["phase"] == Phase.GRAD_SYNC
        begins, ends = [begin_ns[is_sync]], [end_ns[is_sync]]
    if calls is not None:
        waited = calls[calls["blocked_ns"] > 0]
        begins.append(waited["exit_ns"] - waited["blocked_ns"])
        ends.append(waited["exit_ns"].astype(np.int64))
    begins_ns, ends_ns = np.concatenate(begins), np.concatenate(ends)
    is_sound = (begins_ns < ends_ns) & (begins_ns > -_MAX_NS) & (ends_ns < _MAX_NS)
    blocked_ns = union_ns(begins_ns[is_sound], ends_ns[is_sound])
    step_ns = sum(step.end_ns - step.begin_ns for step in steps) / len(steps)
    return Detail(
        looked_s=now_s,
        num_steps=len(steps),
        step_ns=step_ns,
        blocked_ns=min(blocked_ns / len(steps), step_ns),
        phases_ns=phases_ns,
    )


def _blended(before: Detail, now: Detail) -> Detail:
    """Return a mean over the last steps: those of some seconds, so that single slow ones do not name a rank."""
    kept = min(before.num_steps, max(_MIN_BLENDED, round(_BLENDED_NS / now.step_ns) if now.step_ns else 0))
    share = kept / (kept + now.num_steps)
    names = before.phases_ns.keys() | now.phases_ns.keys()
    return Detail(
        looked_s=now.looked_s,
        num_steps=kept + now.num_steps,
        step_ns=share * before.step_ns + (1 - share) * now.step_ns,
        blocked_ns=share * before.blocked_ns + (1 - share) * now.blocked_ns,
        phases_ns={
            name: share * before.phases_ns.get(name, 0.0) + (1 - share) * now.phases_ns.get(name, 0.0) for name in names
        },
    )


def _interval(rows: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of rows: on the device where both are known, otherwise on the host."""
    begin_ns, end_ns = rows["begin_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    if "device_end_ns" in (rows.dtype.names or ()):
        is_known = (rows["device_begin_ns"] > 0) & (rows["device_end_ns"] > 0)
        begin_ns = np.where(is_known, rows["device_begin_ns"], begin_ns)
        end_ns = np.where(is_known, rows["device_end_ns"], end_ns)
    return begin_ns, end_ns
