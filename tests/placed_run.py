"""Runs whose traffic is known: data, pipeline and tensor parallel ranks on hosts below leaf switches, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.synthetic_run import MS, START_NS, header_of
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.metrics import Ints
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op, Phase, StepFlag
from library.volume import Operation

_STEP_NS, _OPERATION_NS, _COMPUTE_NS = 200 * MS, MS, 10 * MS


@dataclass(frozen=True, kw_only=True)
class PlacedRun:
    """What to write.

    Attributes:
        operations: of a step, in the order in which every member issues them.
        host: of each rank, int64, (num_ranks,).
        leaves: the leaf of each host.
        num_steps: with one that is warm-up.
        lengths_ns: how long each operation lasts, one after the other on each rank; empty where each lasts as long, and
            begins when all that precede it in `operations` have ended.
    """

    operations: Sequence[Operation]
    host: Ints
    leaves: Sequence[int]
    num_steps: int = 4
    lengths_ns: Sequence[int] = ()

    @property
    def hosts(self) -> list[str]:
        """The name of each host."""
        return [f"n{number}" for number in range(len(self.leaves))]

    def write(self, path: Path) -> RunDirectory:
        """Write the traces and return the run."""
        run = RunDirectory(path)
        attempt = run.new_attempt()
        groups = list(dict.fromkeys(operation.ranks for operation in self.operations if operation.kind != "send"))
        for rank in range(len(self.host)):
            self._write_rank(attempt, rank, groups)
        return run

    def _write_rank(self, attempt: Attempt, rank: int, groups: Sequence[tuple[int, ...]]) -> None:
        at = int(self.host[rank])
        local = int((self.host[:rank] == at).sum())
        header = header_of(
            rank,
            len(self.host),
            local_rank=local,
            local_size=int((self.host == at).sum()),
            node=at,
            host=self.hosts[at],
            host_key=f"key-{at}",
            samples_unit="tokens",
            topology_addr=f"spine.leaf{self.leaves[at]}.{self.hosts[at]}",
        )
        end_ns = START_NS + self.num_steps * _STEP_NS
        recorder = Recorder(attempt.trace_file(rank), header, warn=_fail, clock=lambda: end_ns)
        for number, members in enumerate([tuple(range(len(self.host))), *groups]):
            for member in members if rank in members else ():
                recorder.add_group(number, member, f"group {members}".encode(), b"gloo")
        for local_ns in (START_NS, end_ns):
            recorder.add_clock(0, local_ns, 0, 0 if rank == 0 else 200, 0 if rank == 0 else 100, 20)
        for step in range(self.num_steps):
            self._write_step(recorder, rank, step, groups)
        recorder.close()

    def _write_step(self, recorder: Recorder, rank: int, step: int, groups: Sequence[tuple[int, ...]]) -> None:
        begin_ns = START_NS + step * _STEP_NS
        recorder.add_phase(step, Phase.FORWARD, begin_ns, begin_ns + _COMPUTE_NS, -1)
        rows = list(self._rows(rank, groups))
        in_step = Counter((group, op, peer) for _, group, op, _, peer in rows)
        done: Counter[tuple[int, Op, int]] = Counter()
        free_ns = begin_ns + _COMPUTE_NS
        for place, group, op, size_bytes, peer in rows:
            seq = step * in_step[group, op, peer] + done[group, op, peer]
            done[group, op, peer] += 1
            length_ns = self.lengths_ns[place] if self.lengths_ns else _OPERATION_NS
            enter_ns = free_ns if self.lengths_ns else free_ns + place * _OPERATION_NS
            free_ns = enter_ns + length_ns if self.lengths_ns else free_ns
            row = (enter_ns, enter_ns + length_ns, length_ns, ExitKind.COMPLETION)
            recorder.add_collective(step, group, seq, op, size_bytes, peer, *row)
        flags = StepFlag.WARMUP if step == 0 else StepFlag.NONE
        recorder.add_step(step, begin_ns, begin_ns + _STEP_NS, 8, flags)

    def _rows(self, rank: int, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, Op, int, int]]:
        """Yield what a rank does in a step: place among all operations, group, operation, size and peer."""
        for place, operation in enumerate(self.operations):
            if rank not in operation.ranks:
                continue
            if operation.kind == "send":
                source, destination = operation.ranks
                op, peer = (Op.SEND, destination) if rank == source else (Op.RECV, source)
                yield place, 0, op, operation.size_bytes, peer
            else:
                yield place, groups.index(operation.ranks) + 1, Op[operation.kind.upper()], operation.size_bytes, -1


def layout_operations(first: int, second: int, kind: str, *, large: int, small: int) -> list[Operation]:
    """Return a step of `first` data-parallel replicas of `second` ranks, pipeline stages or tensor-parallel slots.

    Args:
        first: number of replicas.
        second: ranks of each, next to each other.
        kind: `pp` for messages of `large` bytes between neighbours, `tp` for all-reduces of them.
        large: bytes inside a replica.
        small: bytes of an all-reduce over replicas.
    """
    ranks = np.arange(first * second).reshape(first, second).tolist()
    found = []
    for replica in ranks:
        if kind == "tp":
            found.append(Operation("all_reduce", kind, tuple(replica), large, 4))
        else:
            for pair in pairwise(replica):
                found += [Operation("send", kind, way, large, 4) for way in (pair, pair[::-1])]
    found += [Operation("all_reduce", "dp", group, small, 4) for group in zip(*ranks, strict=True)]
    return found


def _fail(message: str) -> None:
    raise AssertionError(message)
