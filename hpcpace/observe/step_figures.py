"""The figures of a rank's last steps for loggers of the job, see `Session.metrics`.

They are made when somebody asks, from rows that the recorder has in memory anyway: the thread that trains does nothing
for them. What a nanosecond counts as is decided by the function that reports use, so that logged figures and those of
`hpcpace report` agree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import NO_STEP, TABLES, StepFlag

MeasureParts = Callable[..., NDArray[np.float64]]
"""Divides steps into parts: `hpcpace.metrics.phases.parts_of_steps`, whose parts PART_NAMES names."""

PART_NAMES = (
    *("data", "forward", "backward", "optimizer", "gc", "pace", "checkpoint", "eval"),
    *("communication", "communication", "communication", "communication", "other", "other"),
)
"""The parts of a step in their order, as they are logged. How much of communication is waiting for others shows only
in the traces of all ranks."""

_ALWAYS = ("data", "forward", "backward", "optimizer", "communication", "other")
_PREFIX = "hpcpace/"
_MAX_STEPS = 1024  # memory: 150 kB
_MAX_WAITING = 65_536  # memory: 4 MB
_NS_PER_MS = 1e6
_BYTES_PER_MIB = 1 << 20
_TABLES = ("steps", "phases", "collectives")  # steps first: rows of a step that has ended are there before its own


class _Step(NamedTuple):
    """A step that has ended; `parts_ns` is None where its phases were not recorded."""

    duration_ns: int
    samples: int
    parts_ns: NDArray[np.float64] | None


class StepFigures:
    """Makes figures of the last steps of one rank.

    Args:
        recorder: of the rank.
        measure_parts: divides steps into parts.

    Attributes:
        memory_bytes: memory of the process and of its GPU, as sampled last; 0 where unknown.
    """

    def __init__(self, recorder: Recorder, measure_parts: MeasureParts) -> None:
        self.memory_bytes = (0, 0)
        self._recorder, self._measure_parts = recorder, measure_parts
        self._rows: dict[str, list[NDArray[np.void]]] = {name: [] for name in _TABLES}
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._num_new = 0
        self._incomplete_until = NO_STEP
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def take(self, last_steps: int | None) -> dict[str, float]:
        """Return the figures of the steps since the last call, or of the last steps; see `Session.metrics`."""
        if not self._lock.acquire(blocking=False):  # another thread asks, or this one from a signal handler
            return {}
        try:
            self._look()
            if last_steps is None:
                num_steps, self._num_new = min(self._num_new, len(self._steps)), 0
            else:
                num_steps = min(max(last_steps, 0), len(self._steps))
            return self._figures(list(self._steps)[len(self._steps) - num_steps :]) if num_steps else {}
        finally:
            self._lock.release()

    def _look(self) -> None:
        """Take the rows since the last look, and divide the steps that have ended."""
        for name in _TABLES:
            rows, has_gap = self._recorder.take_recent(name)
            if has_gap and len(rows):
                self._incomplete_until = max(self._incomplete_until, int(rows["step"][0]))
            if len(rows):
                self._rows[name].append(rows)
        if sum(len(part) for parts in self._rows.values() for part in parts) > _MAX_WAITING:  # of one step without end
            self._incomplete_until = max(int(part["step"].max()) for parts in self._rows.values() for part in parts)
            self._rows = {**self._rows, "phases": [], "collectives": []}
        steps, phases, calls = (np.concatenate(parts) if (parts := self._rows[name]) else None for name in _TABLES)
        if steps is None:
            return
        last = int(steps["step"].max())
        self._rows = {"steps": [], "phases": _later(phases, last), "collectives": _later(calls, last)}
        steps = _timed_there(steps)
        parts_ns = self._measured(steps, phases, calls)
        for index, row in enumerate(steps):
            is_divided = row["step"] > self._incomplete_until and not row["flags"] & (
                StepFlag.PLAIN | StepFlag.UNPHASED
            )
            duration_ns = int(row["end_ns"] - row["begin_ns"])
            self._steps.append(_Step(duration_ns, int(row["samples"]), parts_ns[index] if is_divided else None))
        self._num_new += len(steps)

    def _measured(
        self, steps: NDArray[np.void], phases: NDArray[np.void] | None, calls: NDArray[np.void] | None
    ) -> NDArray[np.float64]:
        """Return the parts of steps, float64, (num_steps, num_parts), ns; all blocked time is transfer."""
        phases = np.zeros(0, TABLES["phases"].dtype) if phases is None else _timed_there(phases)
        calls = np.zeros(0, TABLES["collectives"].dtype) if calls is None else calls
        if "enqueue_ns" in (calls.dtype.names or ()):  # those of the host begin as they are issued
            calls = calls[calls["enter_ns"] != calls["enqueue_ns"]]
        calls = calls[calls["exit_ns"] > 0]
        columns = (calls["enter_ns"], calls["exit_ns"], calls["blocked_ns"], np.zeros(len(calls)))
        return self._measure_parts(
            tuple(steps[name].astype(np.int64) for name in ("begin_ns", "end_ns")),
            (phases["phase"].astype(np.uint8), phases["begin_ns"].astype(np.int64), phases["end_ns"].astype(np.int64)),
            tuple(column.astype(np.int64) for column in columns),
        )

    def _figures(self, steps: Sequence[_Step]) -> dict[str, float]:
        total_ns, samples = sum(step.duration_ns for step in steps), sum(step.samples for step in steps)
        found: dict[str, float] = {"steps": float(len(steps)), "step_ms": total_ns / len(steps) / _NS_PER_MS}
        if samples and total_ns:
            found["samples_per_s"] = samples / total_ns * NS_PER_S
        divided = [step.parts_ns for step in steps if step.parts_ns is not None]
        if divided:
            mean_ns = np.mean(divided, axis=0)
            named: dict[str, float] = {}
            for name, part_ns in zip(PART_NAMES, mean_ns.tolist(), strict=True):
                named[name] = named.get(name, 0.0) + part_ns
            self._seen |= {name for name, part_ns in named.items() if part_ns}
            found |= {f"{name}_ms": ns / _NS_PER_MS for name, ns in named.items() if name in (*_ALWAYS, *self._seen)}
        for name, size_bytes in zip(("memory_mib", "gpu_memory_mib"), self.memory_bytes, strict=True):
            if size_bytes > 0:
                found[name] = size_bytes / _BYTES_PER_MIB
        return {f"{_PREFIX}{name}": value for name, value in found.items()}


def _later(rows: NDArray[np.void] | None, step: int) -> list[NDArray[np.void]]:
    """Return the rows of later steps than one."""
    kept = None if rows is None else rows[rows["step"] > step]
    return [] if kept is None or not len(kept) else [kept.copy()]


def _timed_there(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return rows with their times on the device, those without any left out; on ranks without a device, all."""
    if "device_end_ns" not in (rows.dtype.names or ()):
        return rows
    found = rows[(rows["device_begin_ns"] > 0) & (rows["device_end_ns"] > 0)].copy()
    found["begin_ns"], found["end_ns"] = found["device_begin_ns"], found["device_end_ns"]
    return found
