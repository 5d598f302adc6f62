"""Follow a run look by look: its newest attempt, its journals, and its records.

A look reads only what was appended since the last one, and stops when its time is over; the next one goes on with the
ranks that were left. Nothing here waits for a writer, locks a file or writes one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.audit.snapshot_files import file_name, snapshot_from
from hpcpace.core.codec import read_json
from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.errors import SnapshotError, TraceError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory, rank_of
from hpcpace.core.text import printable
from hpcpace.diagnosis.run_state import StartRecord, read_start
from hpcpace.trace.journal import JournalTail
from hpcpace.trace.reader import read_rank
from hpcpace.trace.schema import StepFlag
from hpcpace.watch.live_rank import DETAIL, LIGHT, LiveRank

_SPECIAL = StepFlag.WARMUP | StepFlag.CHECKPOINT | StepFlag.EVAL
_BARE = StepFlag.PLAIN | StepFlag.UNPHASED
_SNAPSHOTS_A_LOOK = 2
_MAX_PAST, _RECENT = 100_000, 8
_MAX_STEP_NS = 1 << 60
_MAX_NOTES = 5
_NAMED_A_LOOK, _MAX_GROUPS, _LONG_NS = 2, 1024, 1_000_000_000
_MAX_SNAPSHOT_BYTES, _MAX_MBPS = 1 << 20, 1e9


class RankHistory:
    """The steps of one rank since the attempt began, but for the last few: its past.

    Attributes:
        rank: which.
        num_usual: steps of the past that are no warm-up and have neither checkpoint nor evaluation.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._last_step, self._last_end_ns = -1, 0
        self._total_ns = self._num_all = 0
        self._usual_ns: list[int] = []
        self._median: tuple[int, float | None] = 0, None

    def add(self, step: int, end_ns: int, flags: int) -> None:
        """Take the next step; what is missing between makes no interval."""
        if step <= self._last_step:
            return
        if self._last_step >= 0 and step == self._last_step + 1 and 0 < end_ns - self._last_end_ns < _MAX_STEP_NS:
            gap_ns = end_ns - self._last_end_ns
            self._total_ns += gap_ns
            self._num_all += 1
            is_bare = bool(flags & _BARE)  # with less detail, which is marked as a warm-up, too
            if not flags & (_SPECIAL & ~StepFlag.WARMUP if is_bare else _SPECIAL):
                self._usual_ns.append(gap_ns)
                del self._usual_ns[: -2 * _MAX_PAST]
        self._last_step, self._last_end_ns = step, end_ns

    @property
    def num_usual(self) -> int:
        """Usual steps of the past."""
        return max(len(self._usual_ns) - _RECENT, 0)

    @property
    def mean_ns(self) -> float:
        """Mean time of all steps, special ones included; 0 without any."""
        return self._total_ns / self._num_all if self._num_all else 0.0

    @property
    def usual_ns(self) -> float | None:
        """Median time of the usual steps of the past; of all of them while there is no past, and None without any."""
        num_steps = len(self._usual_ns)
        if self._median[1] is None or num_steps > 1.02 * self._median[0]:
            past = self._usual_ns[:-_RECENT] or self._usual_ns
            self._median = num_steps, (float(np.median(past)) if past else None)
        return self._median[1]


@dataclass
class LiveAttempt:
    """One attempt, as it has been seen so far.

    Attributes:
        start: what run.json says.
        facts: name of the run, version and mesh, job and step, as run.json has them.
        ranks: the ranks whose journal was seen.
        names: ranks with a journal now, and with a trace file.
        history: of the rank with the lowest number; None before its first step.
        line_bps: line rates by host and interface, as far as they are known.
        result: the outcome in result.json; empty without one.
        trial: the result of pacing in trial.json; empty without one.
    """

    attempt: Attempt
    start: StartRecord = field(default_factory=StartRecord)
    facts: dict[str, str] = field(default_factory=dict)
    ranks: dict[int, LiveRank] = field(default_factory=dict)
    journals: set[int] = field(default_factory=set)
    traces: set[int] = field(default_factory=set)
    has_packs: bool = False
    history: RankHistory | None = None
    line_bps: dict[str, dict[str, float]] = field(default_factory=dict)
    result: str = ""
    trial: str = ""
    next_rank: int = 0
    next_detail: int = 0


class RunTail:
    """Follows the run at a path, which may not exist yet, and may be moved or removed.

    Args:
        path: of the run.
        number: follow this attempt alone; None: always the newest.
        clock: seconds of a clock that never goes back.

    Attributes:
        followed: the attempt; None while there is none.
        attempts: numbers of those that exist.
        notes: what is wrong with the files, a sentence each.
        look_s: how long the last look took.
        is_removed: whether the run was removed while it was followed.
    """

    def __init__(self, path: Path, *, number: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.followed: LiveAttempt | None = None
        self.attempts: list[int] = []
        self.notes: list[str] = []
        self.look_s = 0.0
        self.is_removed = False
        self._number, self._clock = number, clock
        self._run: RunDirectory | None = None

    def look(self, *, most_s: float, most_cpu_s: float, num_detailed: int) -> None:
        """Look at the run once.

        Args:
            most_s, most_cpu_s: time after which the look ends; the ranks that are left come first the next time.
            num_detailed: ranks looked at in detail, beside those that are already.
        """
        begin_s, begin_cpu_s = self._clock(), time.thread_time()
        self.notes = []
        if not self._open():
            return
        assert self.followed is not None
        followed = self.followed
        try:
            with followed.attempt.open() as folder, folder.folder(followed.attempt.trace_dir.name) as traces:
                self._list(followed, traces.names())
                self._read_records(followed)
                self._choose_detailed(followed, num_detailed)
                if followed.history is None and followed.journals:
                    followed.history = self._history(followed, min(followed.journals), traces)
                for rank in self._in_turn(followed):
                    self._look_at(followed, rank, traces)
                    followed.next_rank = rank + 1
                    if self._clock() - begin_s > most_s or time.thread_time() - begin_cpu_s > most_cpu_s:
                        break
                self._name_groups(followed, traces)
        except OSError as error:
            self._note(f"{followed.attempt.trace_dir} cannot be read ({error.strerror})")
        self.look_s = self._clock() - begin_s

    @property
    def now_s(self) -> float:
        """The time by the clock of the looks."""
        return self._clock()

    def _note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(printable(text))

    def _open(self) -> bool:
        """Find the attempt to follow; return whether there is one."""
        if self._run is not None and self._run.folder is not None:
            with suppress(OSError):
                self._run.folder.names()
            if not _is_there(self._run.folder):
                self.is_removed = True
                self._run = None
        if self._run is None:
            try:
                self._run = RunDirectory(self.path, Folder.open(self.path))
            except OSError:
                return self.followed is not None and not self.is_removed
            self.is_removed = False
        found = self._run.attempts()
        self.attempts = [attempt.number for attempt in found]
        if self._number is not None:
            found = [attempt for attempt in found if attempt.number == self._number]
        if not found:
            return False
        if self.followed is None or self.followed.attempt != found[-1]:
            self.followed = LiveAttempt(attempt=found[-1])
        return True

    def _read_records(self, followed: LiveAttempt) -> None:
        problems: list[str] = []
        if not followed.start.created_unix_ns:
            followed.start = read_start(followed.attempt, problems)
            followed.facts = (
                read_json(followed.attempt, followed.attempt.run_json.name, _facts, problems) or followed.facts
            )
        if not followed.journals and not followed.result:
            followed.result = read_json(followed.attempt, followed.attempt.result_json.name, _outcome, problems) or ""
        if not followed.trial and not followed.journals:
            followed.trial = read_json(followed.attempt, followed.attempt.trial_json.name, _trial, problems) or ""
        for problem in problems:
            self._note(problem)
        hosts = {rank.header.host for rank in followed.ranks.values() if rank.header is not None and rank.network}
        for host in sorted(hosts - set(followed.line_bps))[:_SNAPSHOTS_A_LOOK]:
            followed.line_bps[host] = _line_rates(followed.attempt, host)

    def _list(self, followed: LiveAttempt, names: list[str]) -> None:
        followed.journals, followed.traces = set(), set()
        for name in names:
            rank = rank_of(name)
            if rank is not None and rank < MAX_RANKS:
                (followed.journals if name.endswith(".journal") else followed.traces).add(rank)
        followed.has_packs = any(name.startswith("pack-") for name in names)
        for rank in followed.journals - followed.ranks.keys():
            followed.ranks[rank] = LiveRank(rank, JournalTail(followed.attempt.trace_file(rank).stem + ".journal"))

    def _in_turn(self, followed: LiveAttempt) -> list[int]:
        """Return the ranks to look at, those first that the last look left out."""
        ranks = sorted(followed.journals)
        place = int(np.searchsorted(ranks, followed.next_rank))
        return ranks[place:] + ranks[:place]

    def _choose_detailed(self, followed: LiveAttempt, num_detailed: int) -> None:
        """Begin to look at the next ranks in detail, in turns; those whose turn has shown a whole step make room."""
        ranks = sorted(followed.journals)
        if len(ranks) > num_detailed:
            for live in followed.ranks.values():
                if live.is_in_detail and live.detail is not None and live.detail.looked_s == live.looked_s:
                    live.end_detail()
        num_free = num_detailed - sum(live.is_in_detail for live in followed.ranks.values())
        place = int(np.searchsorted(ranks, followed.next_detail))
        for rank in (ranks[place:] + ranks[:place])[: max(num_free, 0)]:
            followed.ranks[rank].begin_detail()
            followed.next_detail = rank + 1

    def _look_at(self, followed: LiveAttempt, rank: int, traces: Folder) -> None:
        live = followed.ranks[rank]
        # Of operations that are open for long it matters when they complete; there are few of them then.
        is_slow = live.has_open
        wanted = LIGHT + (DETAIL if live.is_in_detail else ("collectives",) if is_slow else ())
        try:
            tail = live.tail.look(traces, wanted)
        except FileNotFoundError:
            followed.journals.discard(rank)
            return
        except (OSError, TraceError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            live.problem, live.looked_s = printable(str(reason)), self._clock()
            self._note(f"rank {rank}: {reason}")
            return
        if live.header is not None and tail.header.created_unix_ns != live.header.created_unix_ns:
            followed.ranks[rank] = live = LiveRank(rank, live.tail)
        new = live.take(tail, self._clock())
        if live.header is not None and live.header.rank != rank:
            live.problem = f"its journal says that it is rank {live.header.rank}"
        if followed.history is not None and followed.history.rank == rank:
            for step in new:
                followed.history.add(step.step, step.end_ns, step.flags)

    def _name_groups(self, followed: LiveAttempt, traces: Folder) -> None:
        """Read the names of the groups of a few ranks that are in an operation for long."""
        lacking = [one for one in followed.ranks.values() if one.lacks_names and (one.step_age_ns or 0) > _LONG_NS]
        for live in lacking[:_NAMED_A_LOOK]:
            names = {number: str(number) for number in range(_MAX_GROUPS)}
            with suppress(TraceError, OSError, MemoryError):
                name = followed.attempt.trace_file(live.rank).name
                groups = read_rank(name, traces, most_rows=-1, tables=("groups",)).trace.tables["groups"]
                found = dict(zip(groups["id"].tolist(), groups["name"].tolist(), strict=True))
                names |= {number: text.decode("utf-8", "backslashreplace") for number, text in found.items()}
            live.name_groups(names)

    def _history(self, followed: LiveAttempt, rank: int, traces: Folder) -> RankHistory:
        """Return the steps that a rank has done before it was looked at."""
        history = RankHistory(rank)
        with suppress(TraceError, OSError, MemoryError):
            name = followed.attempt.trace_file(rank).name
            steps = read_rank(name, traces, most_rows=-1, tables=("steps",)).trace.tables["steps"]
            for step, end_ns, flags in zip(*(steps[n].tolist() for n in ("step", "end_ns", "flags")), strict=True):
                history.add(step, end_ns, flags)
        return history


def _is_there(folder: Folder) -> bool:
    """Return whether a folder that is held open still has a place in the file system."""
    try:
        return os.fstat(folder.descriptor).st_nlink > 0
    except OSError:
        return False


def _facts(content: Any) -> dict[str, str]:
    environment, versions = content.get("environment", {}), content.get("versions", {})
    found = {
        "name": content.get("name", ""),
        "jobid": environment.get("SLURM_JOB_ID", ""),
        "step": environment.get("SLURM_STEP_ID", ""),
        "trace_dir": content.get("config", {}).get("trace", {}).get("trace_dir") or "",
        "policy": content.get("config", {}).get("pace", {}).get("policy", ""),
        **{f"{package}_version": versions.get(package, "") for package in ("hpcpace", "torch")},
    }
    return {name: printable(str(value))[:200] for name, value in found.items()}


def _outcome(content: Any) -> str:
    outcome = content.get("outcome", "")
    return outcome if isinstance(outcome, str) else ""


def _trial(content: Any) -> str:
    return printable(str(content["sentence"]))[:200]


def _line_rates(attempt: Attempt, host: str) -> dict[str, float]:
    """Return the line rates in bits per second of the interfaces of a host that the audit's snapshot knows."""
    with suppress(OSError, SnapshotError), attempt.open() as folder, folder.folder(attempt.snapshot_dir.name) as inner:
        snapshot = snapshot_from(inner.read(f"{file_name(host)}.json", most_bytes=_MAX_SNAPSHOT_BYTES))
        rates = {device.name: device.shaped_mbps or device.speed_mbps or 0 for device in snapshot.net or ()}
        return {name: rate * 1e6 for name, rate in rates.items() if 0 < rate < _MAX_MBPS}
    return {}
