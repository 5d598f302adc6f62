"""Record rows from a training job: it appends packed rows, and a thread writes them.

A row costs the training thread well under a microsecond and never raises. Memory stays bounded even if a write never
returns. Everything that can fail happens in the flush thread.

Ranks share a file system, so their flushes are spread over the interval.
"""

from __future__ import annotations

import contextlib
import copy
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.trace.schema import (
    NO_STEP,
    RECORDED_PHASES,
    TABLES,
    Phase,
    TraceHeader,
    round_times,
    row_dtypes,
    row_struct,
)
from hpcpace.trace.writer import TraceWriter

_MAX_ROWS = 16_384  # memory: 1 MB of the longest rows


class RecentRows:
    """The packed rows of one table that nobody has been handed yet, each handed out once.

    Rows go through a buffer, which the training thread fills and the flush thread empties. Some of those in the buffer
    may have been handed out before they leave it. The caller holds a lock around each call.

    Args:
        row_bytes: length of a row.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._parts: deque[bytes] = deque()
        self._num_rows = self._num_handed = 0
        self._has_gap = False

    def keep(self, packed: bytes) -> None:
        """Keep rows that leave the buffer, in place of the oldest where they are too many."""
        num_rows = len(packed) // self._row_bytes
        new = packed[self._num_handed * self._row_bytes :]
        self._num_handed = max(self._num_handed - num_rows, 0)
        if new:
            self._parts.append(new)
            self._num_rows += len(new) // self._row_bytes
        while self._num_rows > _MAX_ROWS:
            oldest = self._parts.popleft()
            excess = min(self._num_rows - _MAX_ROWS, len(oldest) // self._row_bytes)
            if left := oldest[excess * self._row_bytes :]:
                self._parts.appendleft(left)
            self._num_rows -= excess
            self._has_gap = True

    def take(self, buffer: list[bytes]) -> tuple[bytes, bool]:
        """Return all rows that were not handed out yet, and whether older ones were given up before.

        Args:
            buffer: the rows that stay in the buffer and may be handed out, from its first on.
        """
        packed = b"".join((*self._parts, *buffer[self._num_handed :]))
        has_gap, self._has_gap = self._has_gap, False
        self._parts.clear()
        self._num_rows, self._num_handed = 0, max(self._num_handed, len(buffer))
        return packed, has_gap


@dataclass
class Losses:
    """Rows that were dropped.

    Attributes:
        counts: their number by table.
        reasons: why, in order of the first occurrence.
        first_step, last_step: the steps that they belong to.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, None] = field(default_factory=dict)
    first_step: int = NO_STEP
    last_step: int = NO_STEP

    @property
    def num_rows(self) -> int:
        """Their number."""
        return self.counts.total()

    def add(self, table: str, num_rows: int, reason: str, steps: Iterable[int] = ()) -> None:
        """Count rows of a table, and the steps they belong to, if any."""
        if num_rows:
            self.counts[table] += num_rows
            self.reasons[reason] = None
            known = [step for step in (self.first_step, *steps, self.last_step) if step != NO_STEP]
            self.first_step, self.last_step = min(known, default=NO_STEP), max(known, default=NO_STEP)

    def add_rows(self, table: str, rows: NDArray[np.void], reason: str) -> None:
        """Count rows of a table."""
        steps = np.unique(rows["step"]).tolist() if "step" in (rows.dtype.names or ()) else ()
        self.add(table, len(rows), reason, steps)

    def sentence(self, place: object, *, is_certain: bool = True) -> str:
        """Return what was lost, without a full stop.

        Args:
            place: the trace file.
            is_certain: whether they are lost, or may be.
        """
        tables = ", ".join(f"{count} of {table}" for table, count in self.counts.most_common() if count)
        steps = f"; steps {self.first_step} to {self.last_step}" if self.first_step != NO_STEP else ""
        verb = ("is" if self.num_rows == 1 else "are") + " lost" if is_certain else "may be lost"
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"{rows} of {place} {verb} ({tables}{steps}): {', '.join(self.reasons)}"


_GOLDEN_RATIO = 0.6180339887498949
# A flush that begins this part of an interval early, as waits may end, is the one that is due.
_TOLERANCE = 0.01


class FlushSchedule:
    """The times of the flushes of one rank.

    The golden ratio places any number of ranks evenly over the interval. A flush that is asked for, as at the start by
    all ranks at once, or that takes long, does not move the later ones.

    Args:
        rank: decides on its place in the interval.
        interval_s: seconds between two flushes.
        start_s: time at which all ranks start.

    Attributes:
        first_wait_s: seconds from the start to the first flush.
    """

    def __init__(self, rank: int, interval_s: float, start_s: float) -> None:
        self._interval_s = interval_s
        self.first_wait_s = interval_s * (rank * _GOLDEN_RATIO % 1)
        self._place_s = start_s + self.first_wait_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next flush, after one that ends now; what that was in the way of is left out."""
        left_s = (self._place_s - now_s) % self._interval_s
        return left_s if left_s > _TOLERANCE * self._interval_s else left_s + self._interval_s


AddRow = Callable[..., None]
PhaseEnded = Callable[[Phase, int, int], None]
"""Takes a phase with its begin and end."""
_STEP = struct.Struct("<i")
# Tables whose rows begin with the number of a step that may be provisional.
_STEPPED = ("steps", "phases", "collectives")
# Where `begin_ns` and `end_ns` are in rows with marks on the device: behind `step`, and behind `step` and `phase`.
_MARKED = {"steps": struct.Struct("<4xqq"), "phases": struct.Struct("<5xqq")}
# Longer than the host is ahead of its device, or than a step, since marks are read in the threads that train; shorter
# than the timeouts that end a job whose device hangs.
_DEVICE_PATIENCE_NS = 60_000_000_000
_REMEDY = "make room there, or name another disk in trace.trace_dir"
# Rows that do not fill a chunk always stay in memory; a bound below that would drop rows for ever.
_MIN_MAX_ROWS = sum(table.chunk_rows for table in TABLES.values())


class Recorder:
    """Records the rows of one rank into its trace file, from any thread.

    Each method `add_...` takes one row of its table, columns in file order. Optional columns at its end, and those that
    only ranks with a device have, may be left out and are 0 then. `phase(name)` returns a context manager that records
    its block as a phase of the current step.

    Args:
        path: the HDF5 file.
        warn: called with a warning, from any thread.
        clock: the host's clock, read by any thread.
        mark: what regions read in its place, in the thread that enters and leaves them.
        device_tables: the tables that have the columns of ranks with a device.
        open_folder: opens the folder of the file and makes it if necessary; by default the folder of `path`.
        keep_last: how many of the last steps to keep at least, see `hpcpace.trace.writer.KeptSteps`; 0 keeps all.

    Attributes:
        step: the current step; the owner sets it.
        open_collectives: returns rows of the operations that are entered but not completed; called at each flush.
        device_ns: returns the device's time of a mark, 0 without one, or None if the device has not passed it yet; None
            if there is no device. Steps and phases wait for it in memory, up to 60 s, while `awaits_device`.
        keeps: takes a table and the steps of rows of phases or collectives, and returns which of them to write; None
            for all.
        phase_ended: called for each region, in the thread that leaves it; None for no call.
        max_rows: rows kept in memory while the disk takes none.
        num_events: rows taken from the buffers so far.
        phases_seen: codes of the phases among them.
        num_dropped: rows dropped because memory was full or a value did not fit its column; once closed, also rows that
            the disk never took.
        cost_ns: the recorder's own time so far: processor time of the flush thread, and each row at its measured cost.
    """

    phase_ended: PhaseEnded | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: TraceHeader,
        *,
        flush_interval_s: float = 1.0,
        max_rows: int = 1_000_000,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
        mark: Callable[[], int] | None = None,
        device_tables: Collection[str] = (),
        open_folder: Callable[[], Folder] | None = None,
        keep_last: int = 0,
    ) -> None:
        if max_rows < _MIN_MAX_ROWS:
            raise UsageError(f"max_rows is {max_rows}: use {_MIN_MAX_ROWS} or more, a chunk of each table")
        self.step = NO_STEP
        self.open_collectives: Callable[[], list[tuple[Any, ...]]] | None = None
        self.device_ns: Callable[[int], int | None] | None = None
        self.awaits_device = True
        self.keeps: Callable[[str, np.ndarray], np.ndarray] | None = None
        self.num_events = 0
        self.phases_seen: set[int] = set()
        self.num_dropped = self.cost_ns = 0
        self._clock, self._mark = clock, mark or clock
        self._warn = warn
        self._warned: set[object] = set()
        self.max_rows = max_rows
        # A buffer this long wakes the flush thread early; from there on its rows are counted one by one.
        self._wake_rows = max_rows // 4
        self._rank, self._flush_interval_s = header.rank, flush_interval_s
        self._dtypes = row_dtypes(device_tables)
        self._buffers: dict[str, list[bytes]] = {name: [] for name in self._dtypes}
        self._writer = TraceWriter(
            Path(path), header, device_tables=device_tables, open_folder=open_folder, keep_last=keep_last
        )
        self._reported = (0, 0, 0)
        self._drop_lock = threading.Lock()
        self._dropped = Losses()
        # Why the last flush failed; empty if it succeeded.
        self._write_problem = ""
        self._flush_lock = threading.Lock()
        # Rows of later steps are kept in memory, until their step numbers are settled.
        self._settled_step: int | None = None
        self._rows_lock = threading.RLock()  # a signal may find this thread with it
        self._recent = {name: RecentRows(self._dtypes[name].itemsize) for name in _STEPPED}
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._num_asked = self._num_flushed = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

        self.add_step = self._adder("steps", self._buffers["steps"])
        self.add_phase = self._adder("phases", self._buffers["phases"])
        self.add_collective = self._adder("collectives", self._buffers["collectives"])
        self.add_group = self._adder("groups", self._buffers["groups"])
        self.add_clock = self._adder("clock", self._buffers["clock"])
        self.add_pacing = self._adder("pacing", self._buffers["pacing"])
        self.add_network = self._adder("network", self._buffers["network"])
        self.add_host = self._adder("host", self._buffers["host"])
        self.add_connection = self._adder("connections", self._buffers["connections"])
        self.add_flow = self._adder("flows", self._buffers["flows"])
        self.add_event = self._adder("events", self._buffers["events"])
        regions = {phase: self._region(phase) for phase in RECORDED_PHASES}
        self._regions = regions
        self.phase: Callable[[str], AbstractContextManager[None]] = _Regions(
            {phase.name.lower(): region for phase, region in regions.items()}
        ).__getitem__
        self._row_cost_ns = self._measured_row_cost_ns()

    def start(self) -> None:
        """Start the flush thread; the files appear at the first flush."""
        if self._thread is None and self._process == os.getpid():
            self._thread = threading.Thread(target=self._run, name="hpcpace-flush", daemon=True)
            self._thread.start()

    def regions_under_way(self) -> list[tuple[Phase, int]]:
        """Return the phases whose blocks `phase` has entered and not left, and when each began; for any thread."""
        begun = ((phase, region.begins[0]) for phase, region in self._regions.items())
        return [(phase, begin_ns) for phase, begin_ns in begun if begin_ns]

    def add_packed_collectives(self, packed: bytes, num_dropped: int = 0) -> None:
        """Take rows of `collectives` as the bytes of their dtype, and count rows that found no room before that."""
        rows, num_bytes = self._buffers["collectives"], self._dtypes["collectives"].itemsize
        for first in range(0, len(packed), num_bytes):
            row = packed[first : first + num_bytes]
            if len(rows) < self._wake_rows:
                rows.append(row)
            else:
                self._keep_or_drop("collectives", rows, row)
        if num_dropped:
            self._drop("collectives", num_dropped)

    def take_recent(self, table: str) -> tuple[NDArray[np.void], bool]:
        """Return the rows of steps, phases or collectives since the last call, and whether some before were given up.

        Rows whose step is provisional are returned later, on ranks with a device all rows once they were written: only
        then their times there are known. Safe in any thread; nothing is waited for but another such call.
        """
        with self._rows_lock:
            buffer = self._buffers[table]
            num_ready = 0 if self.device_ns is not None else self._num_settled(table, buffer)
            packed, has_gap = self._recent[table].take(buffer[:num_ready])
        return np.frombuffer(packed, dtype=self._dtypes[table]), has_gap

    def hold_steps_after(self, step: int) -> None:
        """Keep rows of later steps in memory: their step numbers are provisional."""
        self._settled_step = step

    @property
    def num_held(self) -> int:
        """How many rows are in memory, if some of them wait for their step numbers; 0 otherwise."""
        return 0 if self._settled_step is None else sum(len(self._buffers[name]) for name in _STEPPED)

    def settle_steps(self, numbers: Mapping[int, int] | None = None) -> None:
        """Give rows in memory the step numbers that `numbers` has for theirs, and write them from now on."""
        with self._rows_lock:
            for name in _STEPPED if numbers else ():
                rows = self._buffers[name]
                for index in range(len(rows)):
                    step = _STEP.unpack_from(rows[index])[0]
                    rows[index] = _STEP.pack((numbers or {}).get(step, step)) + rows[index][_STEP.size :]
            self._settled_step = None

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Flush now; return whether the flush ended in time, successful or not."""
        if self._thread is None or self._process != os.getpid():
            return False
        with self._progress:
            self._num_asked += 1
            asked = self._num_asked
            self._wake.set()
            return self._progress.wait_for(
                lambda: self._num_flushed >= asked or not self._is_running(), timeout=timeout_s
            )

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write everything, close the file and end the flush thread; give up after a time, because a disk may hang.

        One warning reports everything that could not be written, whatever was reported before.

        Returns:
            Whether nothing writes to the files any more.
        """
        if self._is_closing or self._process != os.getpid():
            return not self._is_running()
        self.start()
        assert self._thread is not None
        self._is_closing = True
        self.settle_steps()
        self._wake.set()
        self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()
        problem = self._write_problem if is_over else f"it hangs for {timeout_s:g} s"
        lost = self._losses(problem, has_buffers=not is_over)
        self.num_dropped = lost.num_rows
        if lost.num_rows:
            self._tell(f"{lost.sentence(self._writer.path, is_certain=is_over)}; {_REMEDY}")
        elif problem:
            self._tell(f"cannot close {self._writer.path}: {problem}; all rows are in it and in its journal")
        return is_over

    def tell_losses(self) -> None:
        """Warn of rows that are in no file, if any; for an exit without `close`."""
        lost = self._losses(self._write_problem or "they could not be written in time", has_buffers=True)
        if lost.num_rows:
            self._tell(f"{lost.sentence(self._writer.path, is_certain=False)}; {_REMEDY}")

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[bool]:
        """Keep the files unchanged during the block; yield whether that worked, because a disk may hang."""
        is_held = self._flush_lock.acquire(timeout=timeout_s)
        try:
            yield is_held
        finally:
            if is_held:
                self._flush_lock.release()

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _adder(self, table: str, rows: list[bytes]) -> AddRow:
        dtype, schema = self._dtypes[table], TABLES[table]
        pack, push, wake_rows = row_struct(dtype).pack, rows.append, self._wake_rows
        keep_or_drop, drop_misfit = self._keep_or_drop, self._drop_misfit

        def add(*row: Any) -> None:
            try:
                if len(rows) < wake_rows:
                    push(pack(*row))
                else:
                    keep_or_drop(table, rows, pack(*row))
            except struct.error as error:
                drop_misfit(table, row, error)

        num_required, num_all = len(schema.dtype.names or ()) - len(schema.optional), len(dtype.names or ())
        if num_required == num_all:
            return add
        zeros = (0,) * num_all
        return lambda *row: add(*row, *zeros[len(row) :]) if num_required <= len(row) < num_all else add(*row)

    def _region(self, phase: Phase) -> Any:
        """Return the region of a phase, which records its row itself: one call less than with `add_phase`."""
        rows = self._buffers["phases"]
        pack = row_struct(TABLES["phases"].dtype, self._dtypes["phases"]).pack
        push, wake_rows = rows.append, self._wake_rows
        clock, keep_or_drop, code, recorder = self._mark, self._keep_or_drop, int(phase), self

        class Region:
            __slots__ = ("begins",)

            def __init__(self) -> None:
                # Linked pairs (begin, outer begins), because a phase may be nested in itself.
                self.begins: tuple[int, Any] = (0, None)

            def __enter__(self) -> None:
                self.begins = (clock(), self.begins)

            def __exit__(self, kind: object, error: object, traceback: object) -> None:
                begin_ns, self.begins = self.begins
                end_ns = clock()
                packed = pack(recorder.step, code, begin_ns, end_ns, -1)
                if len(rows) < wake_rows:
                    push(packed)
                else:
                    keep_or_drop("phases", rows, packed)
                if recorder.phase_ended is not None:
                    recorder.phase_ended(phase, begin_ns, end_ns)

        return Region()

    def _keep_or_drop(self, table: str, rows: list[bytes], packed: bytes) -> None:
        # Rows that wait for the numbers of their steps cannot be written, however often.
        if not self._wake.is_set() and (self._settled_step is None or table not in _STEPPED):
            self._wake.set()
        if sum(map(len, self._buffers.values())) + self._writer.num_kept < self.max_rows:
            rows.append(packed)
        else:
            self._drop(table, 1)

    def _drop(self, table: str, num_rows: int) -> None:
        with self._drop_lock:
            self._dropped.add(table, num_rows, self._why_full, [self.step])
            self.num_dropped += num_rows

    def _drop_misfit(self, table: str, row: tuple[Any, ...], error: struct.error) -> None:
        with self._drop_lock:
            self._dropped.add(table, 1, "a value did not fit its column")
            self.num_dropped += 1
        self._warn_once("row", f"a row of {table} does not fit its columns ({error}): {row!r}")

    @property
    def _why_full(self) -> str:
        what = "writing took so long" if self._settled_step is None else "no step ended for so long"
        return self._write_problem or f"{what} that more than {self.max_rows} rows waited in memory"

    def _losses(self, reason: str, *, has_buffers: bool = False) -> Losses:
        """Return the rows that were dropped and, for the given reason, those that are in no file."""
        with self._drop_lock:
            lost = copy.deepcopy(self._dropped)
        for name, rows in self._writer.missing().items():
            lost.add_rows(name, rows, reason)
            lost.add(name, self._writer.num_removed.get(name, 0), reason)
            lost.add(name, len(self._buffers[name]) if has_buffers else 0, reason)
        return lost

    def _measured_row_cost_ns(self) -> int:
        num_rows = 200
        add = self._adder("phases", [])
        begin_ns = time.perf_counter_ns()
        for _ in range(num_rows):
            add(0, 0, 0, 0, 0)
        return (time.perf_counter_ns() - begin_ns) // num_rows

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        schedule = FlushSchedule(self._rank, self._flush_interval_s, time.monotonic())
        wait_s, is_last = schedule.first_wait_s, False
        while not is_last:
            self._wake.wait(wait_s)
            self._wake.clear()
            asked, is_last = self._num_asked, self._is_closing
            begin_ns = time.thread_time_ns()
            with self._flush_lock:
                self._flush(is_last)
            self.cost_ns += time.thread_time_ns() - begin_ns
            with self._progress:
                self._num_flushed = asked
                self._progress.notify_all()
            wait_s = schedule.wait_s(time.monotonic())

    def _flush(self, is_last: bool) -> None:
        """Flush once. The boundary between tracing and training: every failure becomes one warning and a retry."""
        try:
            self._writer.set_open(self._open_rows())
            self._take_rows()
            if is_last:
                self._writer.close()
            elif self._writer.flush():
                self._warn_once("removed", f"{self._writer.path} was removed while in use; it was made again")
        except Exception as error:
            self._write_problem = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            if not is_last:  # closing has its own warning, which says what was lost
                waits = f"training goes on, up to {self.max_rows} rows wait in memory for a retry"
                self._warn_once("write", f"cannot write {self._writer.path}: {self._write_problem}; {waits}")
        else:
            self._write_problem = ""

    def _take_rows(self) -> None:
        room = max(self.max_rows - self._writer.num_kept, 0)
        for name, buffer in self._buffers.items():
            with self._rows_lock:
                num_rows = self._num_timed(name, buffer, self._num_settled(name, buffer))
                packed = b"".join(buffer[:num_rows])
                del buffer[:num_rows]
                if name in self._recent and self.device_ns is None:
                    self._recent[name].keep(packed)
            if not num_rows:
                continue
            rows = self._kept(name, np.frombuffer(bytearray(packed), dtype=self._dtypes[name]))
            num_rows = len(rows)
            if num_rows > room:
                with self._drop_lock:
                    self._dropped.add_rows(name, rows[room:], self._why_full)
                    self.num_dropped += num_rows - room
                rows = rows[:room]
            if name in _MARKED and self.device_ns is not None:
                _add_device_times(rows, self.device_ns)
            if name in self._recent and self.device_ns is not None:
                with self._rows_lock:
                    self._recent[name].keep(rows.tobytes())
            round_times(name, rows)
            if name == "phases":
                self.phases_seen.update(np.unique(rows["phase"]).tolist())
            self._writer.add(name, rows)
            room -= len(rows)
            self.num_events += len(rows)
            self.cost_ns += len(rows) * self._row_cost_ns
        # Even if memory is full: otherwise nothing in the file would say so.
        totals = (self.num_events, self.num_dropped, self.cost_ns)
        since = [total - reported for total, reported in zip(totals, self._reported, strict=True)]
        row = np.array([(self._clock(), *since)], dtype=self._dtypes["account"])
        self._writer.add("account", row)
        self._reported = totals

    def _num_settled(self, name: str, rows: list[bytes]) -> int:
        """Return how many of the oldest rows have a step number that is settled."""
        settled = self._settled_step
        if settled is None or name not in _STEPPED:
            return len(rows)
        num_rows = len(rows)
        return next((i for i in range(num_rows) if _STEP.unpack_from(rows[i])[0] > settled), num_rows)

    def _num_timed(self, name: str, rows: list[bytes], num_rows: int) -> int:
        """Return how many of the oldest rows need not wait for their times on the device."""
        device_ns = self.device_ns
        if device_ns is None or name not in _MARKED or not self.awaits_device or self._is_closing:
            return num_rows
        unpack_from, oldest_ns = _MARKED[name].unpack_from, self._clock() - _DEVICE_PATIENCE_NS
        for index in range(num_rows):
            begin_ns, end_ns = unpack_from(rows[index])
            if end_ns > oldest_ns and (device_ns(begin_ns) is None or device_ns(end_ns) is None):
                return index
        return num_rows

    def _open_rows(self) -> np.ndarray:
        """Return the rows of open operations. Also a boundary: an observer that fails must not cost the other rows."""
        dtype = self._dtypes["collectives"]
        try:
            rows = [] if self.open_collectives is None else self.open_collectives()
            packed = np.array([tuple(row) for row in rows], dtype=dtype)
        except Exception as error:
            self._warn_once("open", f"open operations cannot be recorded: {error!r}; everything else is")
            packed = np.zeros(0, dtype=dtype)
        packed = self._kept("collectives", packed)
        round_times("collectives", packed)
        return packed

    def _kept(self, table: str, rows: np.ndarray) -> np.ndarray:
        """Return the rows of a table that are written: not those of steps without such detail."""
        if self.keeps is None or table not in ("phases", "collectives") or not len(rows):
            return rows
        is_kept = self.keeps(table, rows["step"])
        return rows if is_kept.all() else rows[is_kept]

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._tell(message)

    def _tell(self, message: str) -> None:
        # If the warning itself fails, as on a closed stderr, there is nowhere left to report it.
        with contextlib.suppress(Exception):
            self._warn(message)


def _add_device_times(rows: np.ndarray, device_ns: Callable[[int], int | None]) -> None:
    """Fill in when the device passed the marks of steps or phases; 0 where that is not known."""
    for column in ("begin_ns", "end_ns"):
        rows[f"device_{column}"] = [device_ns(host_ns) or 0 for host_ns in rows[column].tolist()]
    # Marks in two streams, and marks that were mapped by two anchors, can be some microseconds in the wrong order.
    is_known = rows["device_end_ns"] != 0
    np.maximum(rows["device_end_ns"], rows["device_begin_ns"], out=rows["device_end_ns"], where=is_known)


class NullRecorder:
    """Replaces a recorder while tracing is off."""

    def __init__(self) -> None:
        self.step = NO_STEP
        off = _Off()
        self.phase: Callable[[str], AbstractContextManager[None]] = _Regions(
            {phase.name.lower(): off for phase in RECORDED_PHASES}
        ).__getitem__


class _Off:
    __slots__ = ()
    # Two empty Python functions cost 45 ns more than this builtin, which takes any arguments and returns the false "".
    __enter__: Any = "".format
    __exit__: Any = "".format


class _Regions(dict[str, AbstractContextManager[None]]):
    """The regions by name; the dictionary's own lookup costs a fifth of a method written in Python."""

    def __missing__(self, name: str) -> AbstractContextManager[None]:
        raise UsageError(f"no phase is called {name!r}: use one of {', '.join(self)}")
