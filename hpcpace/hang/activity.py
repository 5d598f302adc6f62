"""What a rank does now: sleep, wait for I/O or compute, by the kernel; and in which part of its step, by a guess.

On the rank's own host /proc says it at once; the process is the one that has the rank's journal open. Elsewhere the
processor time says it that each rank records once a second anyway. Only the few ranks that a verdict names are looked
at, and the job does nothing for it. Traces have phases and steps only once they end, so the part of a step is a guess
from earlier steps, and is called one in words.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, shortened
from hpcpace.hang.views import Activity, Doing, FoundHang, ProcessState, RankView
from hpcpace.trace.reader import read_rank
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import RankTrace, Table

_STEPS_COMPARED = 64
_DOING = {
    Phase.DATA: Doing.LOADING,
    Phase.CHECKPOINT: Doing.SAVING,
    Phase.EVAL: Doing.EVALUATING,
    Phase.GRAD_SYNC: Doing.COMMUNICATING,
}

_AFTER = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.GRAD_SYNC: "the gradients' synchronization",
    Phase.OPTIMIZER: "the optimizer",
    Phase.PACE: "pacing",
    Phase.CHECKPOINT: "a checkpoint",
    Phase.EVAL: "an evaluation",
}
# Times of operations are rounded, those of phases are not.
_ROUNDING_NS = 1000

Int64s = NDArray[np.int64]


class UnderWay(NamedTuple):
    """What a rank does, and since when, on the clock of its trace.

    Attributes:
        is_guess: whether that is only what usually comes next.
        after: what it did last, for words; empty where unknown.
    """

    doing: Doing
    since_ns: int | None
    is_guess: bool = False
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The steps and phases that a rank has finished, in the order of their ends; times on one clock.

    Attributes:
        step, step_end_ns, step_times_ns, step_flags: of each step, int64, (num_steps,).
        phase, phase_step, phase_end_ns, phase_times_ns: of each phase, int64, (num_phases,).
    """

    step: Int64s
    step_end_ns: Int64s
    step_times_ns: Int64s
    step_flags: Int64s
    phase: Int64s
    phase_step: Int64s
    phase_end_ns: Int64s
    phase_times_ns: Int64s

    def last_step(self, at_ns: int) -> int:
        """Return the last step that had ended by a time; -1 without one."""
        return int(self.step[self.step_end_ns <= at_ns].max(initial=-1))

    def times_of_ns(self, phase: Phase, at_ns: int) -> Int64s:
        """Return how long each phase of a kind lasted that had ended by a time, int64, (num_such,)."""
        times_ns: Int64s = self.phase_times_ns[(self.phase == phase) & (self.phase_end_ns <= at_ns)]
        return times_ns


def doing_of_code(phase: int) -> Doing:
    """Return what a rank does in a phase of this code."""
    return _DOING.get(Phase(phase), Doing.COMPUTING) if phase in Phase._value2member_map_ else Doing.UNKNOWN


def finished(steps: Table, phases: Table, step_ns: tuple[Int64s, Int64s], phase_ns: tuple[Int64s, Int64s]) -> Finished:
    """Return what a rank has finished, from its tables and their begins and ends on one clock."""
    by_end, order = np.argsort(step_ns[1], kind="stable"), np.argsort(phase_ns[1], kind="stable")
    return Finished(
        step=np.asarray(steps["step"], np.int64)[by_end],
        step_end_ns=step_ns[1][by_end],
        step_times_ns=(step_ns[1] - step_ns[0])[by_end],
        step_flags=np.asarray(steps["flags"], np.int64)[by_end],
        phase=np.asarray(phases["phase"], np.int64)[order],
        phase_step=np.asarray(phases["step"], np.int64)[order],
        phase_end_ns=phase_ns[1][order],
        phase_times_ns=(phase_ns[1] - phase_ns[0])[order],
    )


def under_way(done: Finished, at_ns: int, *, last_exit_ns: int | None) -> UnderWay:
    """Return what a rank did at a time, as far as its earlier steps tell.

    A trace has phases once they end. So a phase that is under way is guessed: it is the one that came next in all of
    the last steps. Where some had another one, such as a checkpoint, it is that one if its steps were equally far apart
    and this step continues them.

    Args:
        done: what it has finished.
        at_ns: the time.
        last_exit_ns: when it last left an operation; None without one.
    """
    begin_ns = done.phase_end_ns - done.phase_times_ns
    within = np.flatnonzero((begin_ns <= at_ns) & (at_ns < done.phase_end_ns))
    if len(within):  # it ended later
        row = int(within[begin_ns[within].argmax()])
        return UnderWay(doing_of_code(int(done.phase[row])), int(begin_ns[row]))
    # Garbage is collected at any place of a step, and by any thread.
    ends_ns = (done.step_end_ns, done.phase_end_ns[done.phase != Phase.GC])
    step_ends, phase_ends = (ends[ends <= at_ns] for ends in ends_ns)
    since = [*step_ends[-1:].tolist(), *phase_ends[-1:].tolist(), *([] if last_exit_ns is None else [last_exit_ns])]
    if not since:
        return UnderWay(Doing.STARTING, None)
    this_step = done.last_step(at_ns) + 1
    past = np.flatnonzero((done.phase_end_ns <= at_ns) & (done.phase != Phase.GC))
    after = ""
    if len(past) and int(done.phase_end_ns[past[-1]]) + _ROUNDING_NS >= (last_exit_ns or 0):
        after = _AFTER.get(Phase(int(done.phase[past[-1]])), "")
    return UnderWay(_next(done, at_ns, this_step), max(since), is_guess=True, after=after)


def _next(done: Finished, at_ns: int, this_step: int) -> Doing:
    is_past = (done.phase_end_ns <= at_ns) & (done.phase != Phase.GC)
    num_before = int((is_past & (done.phase_step == this_step)).sum())
    next_of: dict[int, Doing] = {}
    recent = is_past & (done.phase_step < this_step) & (done.phase_step >= this_step - _STEPS_COMPARED)
    for step in np.unique(done.phase_step[recent]).tolist():
        phases = done.phase[is_past & (done.phase_step == step)]
        has_next = len(phases) > num_before
        next_of[step] = doing_of_code(int(phases[num_before])) if has_next else Doing.UNKNOWN
    if not next_of:
        return Doing.UNKNOWN
    usual, num_usual = Counter(next_of.values()).most_common(1)[0]
    for doing in set(next_of.values()) - {usual}:
        steps = [step for step, one in next_of.items() if one is doing]
        apart = {later - earlier for earlier, later in pairwise([*steps, this_step])}
        if len(steps) > 1 and len(apart) == 1:
            return doing
    return usual if 2 * num_usual > len(next_of) else Doing.UNKNOWN


_MAX_LOOKED_AT = 8
"""Named ranks that are looked at; a verdict has words for no more."""
_MAX_BYTES = 1 << 26
"""Memory for the counters of one rank: those of four days."""
_MAX_FILES = 4096
"""Open files of a process among which the journal is looked for; a rank opens it before most others."""
_WATCH_S, _NUM_LOOKS = 0.5, 5
"""How long a process is watched: 50 of the kernel's ticks of processor time, and how often its state is read."""
_RECENT_NS = 20 * NS_PER_S
"""How far back recorded counters are looked at, as far as the rank has been where it is."""
_MIN_RECORDED_NS = 3 * NS_PER_S
"""Over how long they must go: they are recorded once a second."""
# A thread that computes or spins uses a whole core, or waits for one; one that sleeps and polls uses a hundredth.
_MIN_RUNNING_CORES, _MAX_ASLEEP_CORES = 0.5, 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Look(NamedTuple):
    """What /proc/PID/stat says: the state of the main thread, processor time of all threads, and when it started."""

    state: str
    cpu_ns: int
    start_ns: int


def with_activity(found: FoundHang, attempt: Attempt, *, is_running: bool = False) -> FoundHang:
    """Return a hang with what the kernel says of the ranks that it names.

    Args:
        found: the hang.
        attempt: in which it was found.
        is_running: whether the run goes on, and half a second may be taken to watch its processes on this host.
    """
    named = [found.job.ranks[rank] for rank in (found.hang.culprits or found.hang.could_be)]
    views = [view for view in named if view.is_recorded and not view.is_gone][:_MAX_LOOKED_AT]
    now = _look_here(attempt, [view.rank for view in views]) if is_running else {}
    seen = {view.rank: now.get(view.rank) or _recorded(attempt, view, found.job.now_ns) for view in views}
    changed = {view.rank: replace(view, activity=seen[view.rank]) for view in views}
    return replace(found, job=replace(found.job, ranks={**found.job.ranks, **changed}))


def _recorded(attempt: Attempt, view: RankView, now_ns: int) -> Activity | None:
    """Return what the processor time says that a rank recorded since it is where it is; None for too little of it."""
    trace = _counters(attempt, view.rank)
    if trace is None or view.doing_since_ns is None:
        return None
    table = trace.tables["host"]
    known = np.flatnonzero(np.asarray(table["cpu_time_ns"]) > 0)
    times_ns, cpu_ns, wait_ns = (
        np.asarray(table[name], np.int64)[known] for name in ("time_ns", "cpu_time_ns", "run_wait_ns")
    )
    # Lengths of time are the same on all clocks; the last row is from about now.
    age_ns = min(now_ns - view.doing_since_ns - NS_PER_S, _RECENT_NS)
    if not len(known) or age_ns < _MIN_RECORDED_NS:
        return None
    begin = int(np.searchsorted(times_ns, times_ns[-1] - age_ns))
    over_ns = int(times_ns[-1] - times_ns[begin])
    if over_ns < _MIN_RECORDED_NS:
        return None
    cores = float(cpu_ns[-1] - cpu_ns[begin]) / over_ns
    wanted = cores + float(wait_ns[-1] - wait_ns[begin]) / over_ns
    if cores < 0 or _MAX_ASLEEP_CORES < wanted < _MIN_RUNNING_CORES:
        return None
    state = ProcessState.RUNNING if wanted >= _MIN_RUNNING_CORES else ProcessState.ASLEEP
    return Activity(state=state, cores=cores, over_ns=over_ns, is_now=False)


def _counters(attempt: Attempt, rank: int) -> RankTrace | None:
    """Return the trace of a rank that has a file of its own, with its counters alone; None where it cannot be read."""
    try:
        with attempt.open() as run, run.folder(attempt.trace_dir.name) as folder:
            name = attempt.trace_file(rank).name
            return read_rank(name, folder, most_rows=-1, tables=("host",), most_bytes=_MAX_BYTES).trace
    except (OSError, TraceError):
        return None


def _look_here(attempt: Attempt, ranks: Sequence[int]) -> dict[int, Activity]:
    """Watch the processes of ranks on this host for a moment."""
    pids = _processes(attempt, ranks)
    looks: dict[int, list[_Look]] = {rank: [] for rank in pids}
    begin_ns = time.monotonic_ns()
    for number in range(_NUM_LOOKS if pids else 0):
        if number:
            time.sleep(_WATCH_S / (_NUM_LOOKS - 1))
        for rank, pid in pids.items():
            if (look := _look(pid)) is not None:
                looks[rank].append(look)
    over_ns = time.monotonic_ns() - begin_ns
    return {rank: _activity(pids[rank], seen, over_ns) for rank, seen in looks.items() if len(seen) == _NUM_LOOKS}


def _activity(pid: int, looks: Sequence[_Look], over_ns: int) -> Activity:
    cores = (looks[-1].cpu_ns - looks[0].cpu_ns) / over_ns
    states = [look.state for look in looks]
    if states[-1] in "Tt":
        state = ProcessState.STOPPED
    elif 2 * states.count("D") > len(states):
        state = ProcessState.BLOCKED
    elif 2 * states.count("R") > len(states) or cores >= _MIN_RUNNING_CORES:
        state = ProcessState.RUNNING
    else:
        state = ProcessState.ASLEEP
    waits = _sleeps_for(pid) if state is ProcessState.ASLEEP else ""
    return Activity(state=state, cores=cores, over_ns=over_ns, is_now=True, pid=pid, waits=waits)


# Functions of the kernel in which a main thread sleeps (proc(5), wchan), up to Linux 6.18. Others, such as those of a
# futex, say nothing of what for.
_WAITS = {
    "wait_for_partner": "to open a pipe, as nobody has its other end open",
    "fifo_open": "to open a pipe, as nobody has its other end open",
    "pipe_write": "in a write to the pipe",
    "anon_pipe_write": "in a write to the pipe",
    "pipe_read": "in a read from the pipe",
    "anon_pipe_read": "in a read from the pipe",
    "sk_wait_data": "in a read from a TCP connection",
    "sk_stream_wait_memory": "in a write to a TCP connection",
    "unix_stream_read_generic": "in a read from a Unix socket",
    "unix_stream_data_wait": "in a read from a Unix socket",
    "do_wait": "for the end of a child process",
    "locks_lock_inode_wait": "for a file lock",
    "fcntl_setlk": "for a file lock",
}


_MAX_PATH = 200  # display: letters of the path of a pipe


def _sleeps_for(pid: int) -> str:
    """Return what the main thread of a process sleeps for; empty where the kernel does not say it."""
    try:
        what = _WAITS.get(Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").partition(".")[0], "")
        if not what.endswith("pipe"):
            return what
        file = int(Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()[1], 16)
        path = Path(f"/proc/{pid}/fd/{file}")
        return f"{what} {shortened(str(path.readlink()), max_letters=_MAX_PATH)}" if path.is_fifo() else what
    except (OSError, ValueError, IndexError):
        return ""


def _processes(attempt: Attempt, ranks: Sequence[int]) -> dict[int, int]:
    """Return the process of each rank on this host: of those that have its journal open, the first one that began.

    Those that it has forked have the journal open as well.
    """
    rank_of: dict[tuple[int, int], int] = {}
    for rank in ranks:
        try:
            status = attempt.trace_file(rank).with_suffix(".journal").stat()
        except OSError:
            continue
        rank_of[status.st_dev, status.st_ino] = rank
    found: dict[int, tuple[int, int]] = {}
    for pid in _numbers(Path("/proc")) if rank_of else ():
        for file in islice(_numbers(Path(f"/proc/{pid}/fd")), _MAX_FILES):
            rank_here = _rank_of_file(Path(f"/proc/{pid}/fd/{file}"), rank_of)
            if rank_here is not None and (look := _look(pid)) is not None:
                found[rank_here] = min(found.get(rank_here, (look.start_ns, pid)), (look.start_ns, pid))
                break
    return {rank: pid for rank, (_, pid) in found.items()}


def _numbers(folder: Path) -> Iterator[int]:
    """Yield the names in a folder of /proc that are numbers; none of a folder of somebody else."""
    try:
        with os.scandir(folder) as entries:
            yield from (int(entry.name) for entry in entries if entry.name.isdecimal())
    except OSError:
        return


def _rank_of_file(path: Path, rank_of: Mapping[tuple[int, int], int]) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return rank_of.get((status.st_dev, status.st_ino))


def _look(pid: int) -> _Look | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks = [int(fields[number]) for number in (11, 12, 19)]  # utime, stime and starttime, see proc(5)
    except (OSError, ValueError, IndexError):
        return None
    utime, stime, start = (tick * NS_PER_S // _TICKS_PER_S for tick in ticks)
    return _Look(state=fields[0], cpu_ns=utime + stime, start_ns=start)
