"""Runs whose truth is known: every rank works, meets the others in one blocking all_reduce, and updates its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import EventKind, ExitKind, Op, Phase, StepFlag, TraceHeader

MS = 1_000_000
DATA_NS, FORWARD_NS, BACKWARD_NS, TRANSFER_NS, OPTIMIZER_NS = 1 * MS, 10 * MS, 20 * MS, 2 * MS, 3 * MS
START_NS = 5_000 * MS


def header_of(rank: int, num_ranks: int, **changes: Any) -> TraceHeader:
    """Return the header of a trace of one host."""
    values = {"run_id": "synthetic", "attempt": 0, "rank": rank, "world_size": num_ranks, "local_rank": rank}
    return TraceHeader(**{**values, "local_size": num_ranks, "node": 0, "host": "n0", **changes})


@dataclass(frozen=True, kw_only=True)
class Extra:
    """What a rank does on top, after it has its data and before its forward pass.

    Attributes:
        phase: which it is recorded as; None leaves it without a phase.
        spread: standard deviation of its length, relative.
        every: steps from one to the next.
    """

    rank: int
    length_ns: int
    phase: Phase | None = None
    every: int = 1
    spread: float = 0.0

    def of_step(self, step: int, random: np.random.Generator) -> int:
        """Return its nanoseconds in a step."""
        if step % self.every:
            return 0
        return int(self.length_ns * max(random.normal(1.0, self.spread), 0.0)) if self.spread else self.length_ns


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ends behind the last step of a run without noise, slow ranks or extras.

    Attributes:
        after_ns: when, after that step; without a kind, its last sign of life.
        kind: of its event; None for a rank that is killed without a word.
        code, text: of its event.
        failed_ns: how long it had been in a last all_reduce that failed just then; None where it never entered it.
    """

    rank: int
    after_ns: int
    kind: EventKind | None = None
    code: int = 0
    text: bytes = b""
    failed_ns: int | None = None

    @property
    def is_killed(self) -> bool:
        """Whether its trace is not closed."""
        return self.kind in (None, EventKind.SIGNAL)


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """What to write.

    Attributes:
        slow: factor on forward and backward, by rank.
        extras: what ranks do on top.
        pattern: factors on forward and backward of all ranks, which repeat step by step.
        step_source, phase_source: what traces say of how steps and phases were found; nothing if empty.
        offsets_ns: each rank's clock minus the reference.
        noise: standard deviation of forward and backward, relative.
        missing: ranks without a file.
        clock_error_ns: what is wrong with the offsets that are recorded, by rank.
        clock_jumps: by rank, the step in which its clock jumps, and by how many nanoseconds.
        halfwidth_ns: of the recorded offsets of all ranks but the reference.
        lost_steps: how many last steps a rank's trace lacks, because the rank was killed before it flushed them.
        hangs: whether all but rank 0 stay in a last all_reduce that rank 0 never enters, and no file is closed.
        endings: how ranks end before their time; the others close their traces in order.
    """

    num_ranks: int = 4
    num_steps: int = 40
    num_warmup: int = 2
    pipeline: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)
    offsets_ns: Mapping[int, int] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("n0",)
    noise: float = 0.0
    missing: tuple[int, ...] = ()
    clock_error_ns: Mapping[int, int] = field(default_factory=dict)
    clock_jumps: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    halfwidth_ns: int = 1000
    lost_steps: Mapping[int, int] = field(default_factory=dict)
    hangs: bool = False
    has_clock: bool = True
    samples_per_step: int = 64
    extras: tuple[Extra, ...] = ()
    endings: tuple[Ending, ...] = ()
    pattern: tuple[float, ...] = (1.0,)
    step_source: str = ""
    phase_source: str = ""

    def write(self, path: Path) -> RunDirectory:
        """Write the traces of one more attempt and return the run."""
        run = RunDirectory(path)
        attempt = run.new_attempt()
        random = np.random.default_rng(1)
        work = random.normal(1.0, self.noise, (self.num_ranks, self.num_steps, 2)) if self.noise else None
        recorders = {rank: self._open(attempt, rank) for rank in range(self.num_ranks) if rank not in self.missing}
        begin_ns = np.full(self.num_ranks, START_NS)
        for step in range(self.num_steps):
            factor = np.array([self.slow.get(rank, 1.0) for rank in range(self.num_ranks)])
            factor *= self.pattern[step % len(self.pattern)]
            forward = FORWARD_NS * factor * (work[:, step, 0] if work is not None else 1.0)
            backward = BACKWARD_NS * factor * (work[:, step, 1] if work is not None else 1.0)
            forward_ns, backward_ns = forward.astype(np.int64), backward.astype(np.int64)
            extras = [(extra, extra.of_step(step, random)) for extra in self.extras]
            extra_ns = np.array(
                [sum(ns for extra, ns in extras if extra.rank == rank) for rank in range(self.num_ranks)], np.int64
            )
            enter_ns = begin_ns + DATA_NS + extra_ns + forward_ns + backward_ns
            exit_ns = int(enter_ns.max()) + TRANSFER_NS if self.num_ranks > 1 else int(enter_ns[0])
            for rank, recorder in recorders.items():
                if step >= self.num_steps - self.lost_steps.get(rank, 0):
                    continue
                offset = self.offsets_ns.get(rank, 0) + self._jumped_ns(rank, step)
                begin, enter, leave = int(begin_ns[rank]) + offset, int(enter_ns[rank]) + offset, exit_ns + offset
                forward_begin = begin + DATA_NS
                end = leave + OPTIMIZER_NS
                recorder.add_phase(step, Phase.DATA, begin, forward_begin, -1)
                for extra, length_ns in extras:
                    if extra.rank == rank and length_ns:
                        if extra.phase is not None:
                            recorder.add_phase(step, extra.phase, forward_begin, forward_begin + length_ns, -1)
                        forward_begin += length_ns
                forward_end = forward_begin + int(forward_ns[rank])
                recorder.add_phase(step, Phase.FORWARD, forward_begin, forward_end, -1)
                recorder.add_phase(step, Phase.BACKWARD, forward_end, leave, -1)
                recorder.add_phase(step, Phase.OPTIMIZER, leave, end, -1)
                if self.num_ranks > 1:
                    blocked = leave - enter
                    recorder.add_collective(
                        step, 0, step, Op.ALL_REDUCE, 4096, -1, enter, leave, blocked, ExitKind.COMPLETION
                    )
                flags = StepFlag.WARMUP if step < self.num_warmup else StepFlag.NONE
                recorder.add_step(step, begin, end, self.samples_per_step // self.num_ranks, flags)
            begin_ns = np.full(self.num_ranks, exit_ns + OPTIMIZER_NS)
        self._finish(attempt, recorders, int(begin_ns[0]))
        return run

    def _jumped_ns(self, rank: int, step: int) -> int:
        """Return by how much the clock of a rank has jumped until a step."""
        first, size_ns = self.clock_jumps.get(rank, (0, 0))
        return size_ns if step >= first else 0

    def _open(self, attempt: Attempt, rank: int) -> Recorder:
        node = rank * len(self.hosts) // self.num_ranks
        pipelines = {"mesh": f"dp={self.num_ranks // self.pipeline},pp={self.pipeline},tp=1", "tp": 0}
        pipelines |= {"dp": rank // self.pipeline, "pp": rank % self.pipeline}
        place = {"node": node, "host": self.hosts[node], "host_key": f"key-{node}", "samples_unit": "tokens"}
        header = header_of(rank, self.num_ranks, attempt=attempt.number, **place, **pipelines)
        num_kept = self.num_steps - self.lost_steps.get(rank, 0)
        end_ns = START_NS + num_kept * 100 * MS + self.offsets_ns.get(rank, 0)
        for ending in self.endings:
            if ending.rank == rank:
                step_ns = DATA_NS + FORWARD_NS + BACKWARD_NS + TRANSFER_NS + OPTIMIZER_NS
                end_ns = START_NS + num_kept * step_ns + self.offsets_ns.get(rank, 0) + ending.after_ns
        recorder = Recorder(attempt.trace_file(rank), header, warn=_fail, clock=lambda: end_ns)
        for member in range(self.num_ranks):
            recorder.add_group(0, member, b"default", b"gloo")
        return recorder

    def _finish(self, attempt: Attempt, recorders: Mapping[int, Recorder], end_ns: int) -> None:
        for rank, recorder in recorders.items():
            before = self.offsets_ns.get(rank, 0)
            offset = before + self._jumped_ns(rank, self.num_steps)
            if self.has_clock:
                halfwidth = 0 if rank == 0 else self.halfwidth_ns
                error = self.clock_error_ns.get(rank, 0)
                for own, time_ns, of_reference in (
                    (before, START_NS, 0),
                    (offset, end_ns, self._jumped_ns(0, self.num_steps)),
                ):
                    recorder.add_clock(0, time_ns + own, own - of_reference + error, 2 * halfwidth, halfwidth, 20)
            sources = {EventKind.STEP_SOURCE: self.step_source, EventKind.PHASE_SOURCE: self.phase_source}
            for kind, text in sources.items():
                if text:
                    recorder.add_event(end_ns, self.num_steps, kind, 0, text.encode())
            endings = [ending for ending in self.endings if ending.rank == rank]
            for ending in endings:
                self._end(recorder, ending, end_ns + offset)
            if rank in self.lost_steps or any(ending.is_killed for ending in endings):
                _kill(recorder, attempt.trace_file(rank))
            elif self.hangs:
                enter = end_ns + offset
                row = (self.num_steps, 0, self.num_steps, Op.ALL_REDUCE, 4096, -1, enter, 0, 0, ExitKind.NEVER)
                recorder.open_collectives = partial(list, [row] if rank else [])
                _kill(recorder, attempt.trace_file(rank))
            else:
                recorder.close()

    def _end(self, recorder: Recorder, ending: Ending, end_ns: int) -> None:
        time_ns = end_ns + ending.after_ns
        if ending.failed_ns is not None:
            row = (time_ns - ending.failed_ns, time_ns, ending.failed_ns, ExitKind.FAILED)
            recorder.add_collective(self.num_steps, 0, self.num_steps, Op.ALL_REDUCE, 4096, -1, *row)
        if ending.kind is not None:
            recorder.add_event(time_ns, self.num_steps, ending.kind, ending.code, ending.text)


def _kill(recorder: Recorder, path: Path) -> None:
    """Leave the files as a killed process leaves them after its last flush."""
    recorder.start()
    recorder.flush()
    left = {file: file.read_bytes() for file in path.parent.glob(f"{path.stem}.*")}
    recorder.close()
    for file, content in left.items():
        file.write_bytes(content)


def _fail(message: str) -> None:
    raise AssertionError(message)
