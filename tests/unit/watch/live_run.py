"""A run that ranks are writing, made without ranks: journals as they have them, and a clock that is set by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.rundir import RunDirectory, write_json
from hpcpace.trace.schema import Op, Phase, TraceHeader, row_dtypes
from hpcpace.trace.writer import TraceWriter
from hpcpace.watch.run_tail import RunTail
from hpcpace.watch.state import HangState, JobState, job_state

DTYPES = row_dtypes()
MS, S = 1_000_000, 1_000_000_000
UNIX_S = 1_700_000_000.0


def row(table: str, **values: Any) -> np.ndarray:
    found = np.zeros(1, DTYPES[table])
    for name, value in values.items():
        found[name] = value
    return found


class LiveRun:
    """Ranks with clocks of their own, one step after the other.

    Attributes:
        now_s: the time of the fake clock, of files, too.
    """

    def __init__(self, folder: Path, *, ranks: int = 4, planned: int | None = 1000, **header: Any) -> None:
        self.run = RunDirectory(folder / "run")
        self.now_s = 100.0
        self.planned, self.num_ranks, self._header = planned, ranks, header
        self.tail = RunTail(self.run.path, clock=lambda: self.now_s)
        self.writers: dict[int, TraceWriter] = {}
        self.step = 0

    def begin(self, **facts: Any) -> None:
        """Begin an attempt: run.json, and a header of each rank."""
        self.close()
        self.attempt = self.run.new_attempt()
        config = {"trace": {"flush_interval_s": 1.0}, "train": {"steps": self.planned}}
        workload = {} if self.planned is None else {"parallelism": {}, "resumed": None}
        record = {
            "name": "demo",
            "created_unix_ns": 1,
            "ranks": [{"rank": r, "host": "n1"} for r in range(self.num_ranks)],
        }
        write_json(self.attempt.run_json, {**record, "config": config, **workload, **facts})
        for rank in range(self.num_ranks):
            self.writers[rank] = TraceWriter(self.attempt.trace_file(rank), self.header(rank))
        self.step = 0

    def header(self, rank: int) -> TraceHeader:
        values: dict[str, Any] = {
            "run_id": "run", "attempt": self.attempt.number, "rank": rank, "world_size": self.num_ranks,
            "local_rank": rank % 2, "local_size": 2, "node": rank // 2, "host": f"n{1 + rank // 2}", "job_id": "17",
            "interfaces": ("eth0", "lo"), "samples_unit": "tokens", "created_unix_ns": 1, **self._header,
        }  # fmt: skip
        return TraceHeader(**values)

    def local_ns(self, rank: int) -> int:
        """Return the time on a rank's clock: each has its own."""
        return round(self.now_s * S) + rank * 1000 * S

    def steps(self, count: int, *, step_s: float = 0.1, own_s: dict[int, float] | None = None, **options: Any) -> None:
        """Let all ranks do steps; `own_s` is the part of a step in which a rank is not blocked, 60 ms by default."""
        for _ in range(count):
            self.now_s += step_s
            for rank in self.writers:
                self._add_step(rank, step_s, (own_s or {}).get(rank, 0.06), **options)
            self.step += 1

    def _add_step(self, rank: int, step_s: float, own_s: float, *, flags: int = 0) -> None:
        writer, end_ns = self.writers[rank], self.local_ns(rank)
        begin_ns, own_ns = end_ns - round(step_s * S), round(own_s * S)
        writer.add("steps", row("steps", step=self.step, begin_ns=begin_ns, end_ns=end_ns, samples=32, flags=flags))
        for phase, first, last in ((Phase.FORWARD, 0.0, 0.5), (Phase.BACKWARD, 0.5, 1.0)):
            interval = {"begin_ns": begin_ns + round(own_ns * first), "end_ns": begin_ns + round(own_ns * last)}
            writer.add("phases", row("phases", step=self.step, phase=phase, **interval))
        call = {"op": Op.ALL_REDUCE, "seq": self.step, "peer": -1, "enter_ns": begin_ns + own_ns, "exit_ns": end_ns}
        blocked_ns = round(step_s * S) - own_ns
        writer.add("collectives", row("collectives", step=self.step, blocked_ns=blocked_ns, **call))

    def flush(self, *ranks: int, dropped: int = 0) -> None:
        """Flush these ranks, or all; files get the time of the fake clock."""
        for rank in ranks or tuple(self.writers):
            writer = self.writers[rank]
            writer.add("account", row("account", time_ns=self.local_ns(rank), dropped=dropped))
            writer.flush()
            self.touch(rank)

    def touch(self, rank: int, *, unix_s: float | None = None) -> None:
        """Set the time of a journal."""
        at_ns = round((UNIX_S + self.now_s if unix_s is None else unix_s) * S)
        os.utime(self.attempt.trace_file(rank).with_suffix(".journal"), ns=(at_ns, at_ns))

    def open_call(self, rank: int, *, op: Op = Op.ALL_REDUCE) -> None:
        """Let a rank enter an operation and stay in it."""
        enter_ns = self.local_ns(rank)
        call = row("collectives", step=self.step, seq=self.step, op=op, peer=-1, enter_ns=enter_ns, exit_kind=2)
        self.writers[rank].set_open(call)

    def look(self, *, hang: HangState | None = None, unix_s: float | None = None, **limits: Any) -> JobState:
        """Look at the run as it is now."""
        self.tail.look(**{"most_s": 1e9, "most_cpu_s": 1e9, "num_detailed": 64, **limits})
        return job_state(self.tail, hang=hang, unix_s=UNIX_S + self.now_s if unix_s is None else unix_s)

    def close(self) -> None:
        """Leave the files as killed ranks do."""
        for writer in self.writers.values():
            writer.abandon()
        self.writers = {}
