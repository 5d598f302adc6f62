"""Traces of a job whose truth is known, written by the recorder: what each rank calls and when, and how it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import EventKind, ExitKind, Op, Phase, TraceHeader

SECOND = 1_000_000_000
START_NS = 100 * SECOND
STEP_S = 0.1


def ns(at_s: float) -> int:
    """Return the time of a moment of the job on the common clock."""
    return START_NS + round(at_s * SECOND)


@dataclass
class WrittenRank:
    """What one rank does; times in seconds of the job.

    Attributes:
        seen_s: when it flushes for the last time.
        flush_until_s: when it flushes for the last time before that; always once a second, if not given.
        wakes_s: when it flushes once more, after a silence.
        is_closed: whether it closes its trace then.
    """

    rank: int
    host: str
    offset_s: float = 0.0
    seen_s: float = 60.0
    flush_until_s: float | None = None
    wakes_s: float | None = None
    is_closed: bool = False
    run_id: str = "written"
    rows: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    open_rows: list[tuple[Any, ...]] = field(default_factory=list)
    sequences: dict[object, int] = field(default_factory=dict)

    def call(
        self,
        op: Op,
        enter_s: float,
        exit_s: float | None = None,
        *,
        group: int = 0,
        step: int = 0,
        size: int = 4096,
        peer: int = -1,
        has_failed: bool = False,
    ) -> None:
        """Call an operation, the next one of its channel; without an end, it stays in it."""
        channel = (group, op, peer) if op in (Op.SEND, Op.RECV) else group
        seq = self.sequences.get(channel, 0)
        self.sequences[channel] = seq + 1
        kind = ExitKind.NEVER if exit_s is None else ExitKind.FAILED if has_failed else ExitKind.COMPLETION
        times = (self.ns(enter_s), 0 if exit_s is None else self.ns(exit_s), 0)
        row = (step, group, seq, op, size, peer, *times, kind)
        if exit_s is None:
            self.open_rows.append(row)
        else:
            self.rows.append(("collective", row))

    def step(self, step: int, begin_s: float, phases: Sequence[tuple[Phase, float]], *, is_over: bool = True) -> None:
        """Go through phases, each of a length, which make up a step; one that is not over has no row of its own."""
        at_s = begin_s
        for phase, length_s in phases:
            self.rows.append(("phase", (step, phase, self.ns(at_s), self.ns(at_s + length_s), -1)))
            at_s += length_s
        if is_over:
            self.rows.append(("step", (step, self.ns(begin_s), self.ns(at_s), 8, 0)))

    def ends(self, at_s: float, kind: EventKind, code: int = 0, text: bytes = b"", *, step: int = 0) -> None:
        """End by itself, and close the trace."""
        self.rows.append(("event", (self.ns(at_s), step, kind, code, text)))
        self.seen_s, self.is_closed = at_s, True

    def ns(self, at_s: float) -> int:
        """Return a time on the clock of the rank."""
        return ns(at_s + self.offset_s)


@dataclass
class WrittenJob:
    """A job to be written; group 0 has all ranks. `world_size` is what its traces say, by default the truth."""

    num_ranks: int = 4
    world_size: int = 0
    groups: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    per_host: int = 4
    ranks: list[WrittenRank] = field(default_factory=list)
    missing: Iterable[int] = ()

    def __post_init__(self) -> None:
        self.ranks = [WrittenRank(rank, f"n{rank // self.per_host}") for rank in range(self.num_ranks)]

    def all_steps(self, num_steps: int, *, first_s: float = 0.0, group: int = 0) -> float:
        """Let all ranks do some usual steps with an all_reduce each, and return when the last one ended."""
        for step in range(num_steps):
            begin_s = first_s + step * STEP_S
            for rank in self.ranks:
                phases = ((Phase.DATA, 0.01), (Phase.FORWARD, 0.04), (Phase.BACKWARD, 0.04), (Phase.OPTIMIZER, 0.01))
                rank.step(step, begin_s, phases)
                rank.call(Op.ALL_REDUCE, begin_s + 0.08, begin_s + 0.09, group=group, step=step)
        return first_s + num_steps * STEP_S

    def write(self, path: Path) -> Attempt:
        """Write the traces of one attempt; what is not closed is left as a kill leaves it."""
        attempt = RunDirectory(path).new_attempt()
        for rank in self.ranks:
            if rank.rank not in self.missing:
                self._write_rank(attempt, rank)
        return attempt

    def _write_rank(self, attempt: Attempt, rank: WrittenRank) -> None:
        until_s = rank.seen_s if rank.flush_until_s is None else rank.flush_until_s
        wakes_s = [] if rank.wakes_s is None else [rank.wakes_s]
        flushes = [0.0, *range(max(int(until_s) - 6, 1), int(until_s)), *wakes_s, rank.seen_s]  # once a second
        times = iter([rank.ns(at_s) for at_s in flushes] + [rank.ns(rank.seen_s)] * 9)
        path = attempt.trace_file(rank.rank)
        recorder = Recorder(path, self._header(attempt, rank), warn=_fail, clock=lambda: next(times))
        for group, (name, members) in {0: ("world", tuple(range(self.num_ranks))), **self.groups}.items():
            if rank.rank in members:
                for member in members:
                    recorder.add_group(group, member, name.encode(), b"gloo")
        for at_s in (0.0, rank.seen_s):
            recorder.add_clock(0, rank.ns(at_s), rank.ns(at_s) - ns(at_s), 2000, 1000 if rank.rank else 0, 20)
        for table, row in rank.rows:
            getattr(recorder, f"add_{table}")(*row)
        recorder.open_collectives = lambda: list(rank.open_rows)
        recorder.start()
        for _ in flushes:
            recorder.flush()
        left = {file: file.read_bytes() for file in path.parent.glob(f"{path.stem}.*")}
        recorder.close()
        if not rank.is_closed:
            for file, content in left.items():
                file.write_bytes(content)

    def _header(self, attempt: Attempt, rank: WrittenRank) -> TraceHeader:
        return TraceHeader(
            run_id=rank.run_id,
            attempt=attempt.number,
            rank=rank.rank,
            world_size=self.world_size or self.num_ranks,
            local_rank=rank.rank % self.per_host,
            local_size=self.per_host,
            node=rank.rank // self.per_host,
            host=rank.host,
            host_key=f"key-{rank.host}",
        )


def _fail(message: str) -> None:
    raise AssertionError(message)
