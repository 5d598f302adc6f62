"""Runs whose times follow from what each rank works: the truth that the metrics of delays must find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcpace.metrics.matching import Matching, match
from hpcpace.metrics.operations import Operations, RankOperations, gather_operations
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.waits import Waits, waits
from hpcpace.trace.schema import TABLES, ExitKind, Op

MS = 1_000_000
TRANSFER_NS = 2 * MS
MESSAGE_NS = MS // 2


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    operations: Operations
    matching: Matching
    waits: Waits
    steps: StepPanel
    ranks: tuple[int, ...]


def known_run(rows, begin_ns, end_ns, *, groups=None, first_step=0):
    """Return the run of ranks 0, 1, ...: their rows, and begin and end of their steps, (num_ranks, num_steps)."""
    num_ranks = len(rows)
    groups = groups or {0: tuple(range(num_ranks))}
    table = [(number, rank, f"g{number}".encode(), b"gloo") for number, of in groups.items() for rank in of]
    parts = []
    for rank, own in enumerate(rows):
        collectives = np.array(own, TABLES["collectives"].dtype)
        named = np.array([row for row in table if rank in groups[row[0]]], TABLES["groups"].dtype)
        parts.append(
            RankOperations(
                rank=rank,
                collectives=collectives,
                groups=named,
                enter_ns=collectives["enter_ns"],
                exit_ns=collectives["exit_ns"],
            )
        )
    operations = gather_operations(parts)
    matching = match(operations)
    num_steps = np.shape(begin_ns)[1]
    steps = StepPanel(
        step=np.arange(first_step, first_step + num_steps),
        begin_ns=np.asarray(begin_ns, np.int64),
        end_ns=np.asarray(end_ns, np.int64),
        samples=np.ones(num_steps, np.int64),
        flags=np.zeros(num_steps, np.uint8),
        num_seen=num_steps,
    )
    return KnownRun(
        operations=operations,
        matching=matching,
        waits=waits(operations, matching),
        steps=steps,
        ranks=tuple(range(num_ranks)),
    )


def data_parallel(work_ns, *, offsets_ns=None, transfer_ns=TRANSFER_NS):
    """Return a run with one blocking all_reduce after each segment; work_ns: (num_ranks, num_steps, num_segments)."""
    work = np.asarray(work_ns, np.int64)
    num_ranks, num_steps, num_segments = work.shape
    offsets = np.zeros(num_ranks, np.int64) if offsets_ns is None else np.asarray(offsets_ns, np.int64)
    rows = [[] for _ in range(num_ranks)]
    begin, end = np.zeros((num_ranks, num_steps), np.int64), np.zeros((num_ranks, num_steps), np.int64)
    now = np.full(num_ranks, 1000 * MS)
    for step in range(num_steps):
        begin[:, step] = now + offsets
        for segment in range(num_segments):
            enter = now + work[:, step, segment]
            exit_ = enter.max() + transfer_ns
            seq = step * num_segments + segment
            for rank in range(num_ranks):
                at, leave = int(enter[rank] + offsets[rank]), int(exit_ + offsets[rank])
                rows[rank].append((step, 0, seq, Op.ALL_REDUCE, 4096, -1, at, leave, leave - at, ExitKind.COMPLETION))
            now = np.full(num_ranks, exit_)
        end[:, step] = now + offsets
    return known_run(rows, begin, end)


def with_buffers(work_ns, *, num_buffered=0):
    """Return a run that broadcasts from rank 0 after half of the work, then reduces; work_ns: (num_ranks, num_steps).

    As by gloo, ranks get the data along a binomial tree, and are held until those have come that they give it to. In
    the first `num_buffered` steps they leave as soon as they have it.
    """
    work = np.asarray(work_ns, np.int64)
    num_ranks, num_steps = work.shape
    rows = [[] for _ in range(num_ranks)]
    begin, now = np.zeros((num_ranks, num_steps), np.int64), np.full(num_ranks, 1000 * MS)
    for step in range(num_steps):
        begin[:, step] = now
        enter = now + work[:, step] // 2
        leave = enter.copy()
        for rank in range(1, num_ranks):
            giver = rank - (1 << (rank.bit_length() - 1))
            leave[rank] = max(leave[rank], leave[giver])
        for rank in range(1, num_ranks) if step >= num_buffered else ():
            giver = rank - (1 << (rank.bit_length() - 1))
            leave[giver] = max(leave[giver], enter[rank])
        leave += TRANSFER_NS
        meet = leave + work[:, step] // 2
        now = np.full(num_ranks, meet.max() + TRANSFER_NS)
        for rank, of_rank in enumerate(rows):
            for op, root, at, until in ((Op.BROADCAST, 0, enter, leave), (Op.ALL_REDUCE, -1, meet, now)):
                times = int(at[rank]), int(until[rank]), int(until[rank] - at[rank])
                of_rank.append((step, 0, 2 * step + (root < 0), op, 64, root, *times, ExitKind.COMPLETION))
    return known_run(rows, begin, np.append(begin[:, 1:], now[:, None], axis=1))


def pipeline(work_ns, *, num_microbatches=1):
    """Return a run in which each stage receives, works, sends on; then all meet; work_ns: (num_stages, num_steps)."""
    work = np.asarray(work_ns, np.int64)
    num_ranks, num_steps = work.shape
    rows = [[] for _ in range(num_ranks)]
    begin, end = np.zeros((num_ranks, num_steps), np.int64), np.zeros((num_ranks, num_steps), np.int64)
    now = np.full(num_ranks, 1000 * MS)
    for step in range(num_steps):
        begin[:, step] = now
        for micro in range(num_microbatches):
            seq, sent = step * num_microbatches + micro, 0
            for rank in range(num_ranks):
                if rank:
                    enter, leave = int(now[rank]), int(max(now[rank], sent) + MESSAGE_NS)
                    rows[rank].append(
                        (step, 0, seq, Op.RECV, 64, rank - 1, enter, leave, leave - enter, ExitKind.COMPLETION)
                    )
                    now[rank] = leave
                now[rank] += work[rank, step]
                if rank < num_ranks - 1:
                    sent = int(now[rank])
                    rows[rank].append((step, 0, seq, Op.SEND, 64, rank + 1, sent, sent + 1000, 1000, ExitKind.WAIT))
                    now[rank] += 1000
        leave = int(now.max()) + TRANSFER_NS
        for rank in range(num_ranks):
            enter = int(now[rank])
            rows[rank].append(
                (step, 0, step, Op.ALL_REDUCE, 4096, -1, enter, leave, leave - enter, ExitKind.COMPLETION)
            )
        now[:] = leave
        end[:, step] = now
    return known_run(rows, begin, end)
