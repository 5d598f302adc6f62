"""Traces of one attempt as other tools want them: on one clock, with what a rank computes between its collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, NS_PER_US
from hpcpace.trace.attempt_reader import read_attempt

# What a call takes on which the rank does not block.
_HELD_NS = 20 * NS_PER_US

_COLUMNS = ("step", "group", "bytes", "enter_ns", "exit_ns", "blocked_ns")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One rank of a run in which ranks compute and all-reduce in turn. Times are on the common clock, int64.

    Attributes:
        rank, num_ranks: in the run.
        members: global ranks of each group, by the group's number.
        step_begins_ns, step_ends_ns: of each step, (num_steps,).
        step: index of the step of each operation, (num_operations,), in the order of entering.
        group, size_bytes: of each operation.
        compute_ns: since when the rank computes for each operation; enter_ns where it does not.
        enter_ns, exit_ns: of each operation.
    """

    rank: int
    num_ranks: int
    members: dict[int, list[int]]
    step_begins_ns: np.ndarray
    step_ends_ns: np.ndarray
    step: np.ndarray
    group: np.ndarray
    size_bytes: np.ndarray
    compute_ns: np.ndarray
    enter_ns: np.ndarray
    exit_ns: np.ndarray


def timelines(attempt: Attempt) -> Iterator[Timeline]:
    """Yield the timelines of all ranks."""
    traces = read_attempt(attempt).traces
    for trace in traces:
        clock, steps = trace.tables["clock"], trace.tables["steps"]
        table = trace.tables["collectives"]
        order = np.argsort(table["enter_ns"], kind="stable")
        done = {column: table[column][order] for column in _COLUMNS}

        def common(times_ns: np.ndarray, clock: np.ndarray = clock) -> np.ndarray:
            return times_ns - np.interp(times_ns, clock["local_ns"], clock["offset_ns"]).astype(np.int64)

        begins_ns, enter_ns, exit_ns = common(steps["begin_ns"]), common(done["enter_ns"]), common(done["exit_ns"])
        step = np.searchsorted(steps["step"], done["step"])
        free_ns = np.maximum.accumulate(np.where(done["blocked_ns"] > 0, exit_ns, enter_ns + _HELD_NS))
        compute_ns = np.maximum(np.concatenate([[0], free_ns[:-1]]), begins_ns[step])
        groups = trace.tables["groups"]
        yield Timeline(
            rank=trace.header.rank,
            num_ranks=len(traces),
            members={int(each): groups["rank"][groups["id"] == each].tolist() for each in np.unique(groups["id"])},
            step_begins_ns=begins_ns,
            step_ends_ns=common(steps["end_ns"]),
            step=step,
            group=done["group"],
            size_bytes=done["bytes"],
            compute_ns=np.minimum(compute_ns, enter_ns),
            enter_ns=enter_ns,
            exit_ns=exit_ns,
        )


# The prefix that HolisticTraceAnalysis 0.5.0 looks for when it seeks stragglers; NCCL since 2.19 says ncclDevKernel.
_KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
_COMPUTE = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3"
_COMPUTE_STREAM, _FIRST_GROUP_STREAM = 7, 20
_LAUNCH_US = 4.0


def write_kineto(folder: Path, timeline: Timeline) -> int:
    """Write the trace of one rank, and return the number of events in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*_steps(timeline), *_operations(timeline)]
    world = f'"backend": "nccl", "rank": {timeline.rank}, "world_size": {timeline.num_ranks}'
    with (folder / f"rank{timeline.rank}_trace.json").open("w") as file:
        file.write(f'{{\n"schemaVersion": 1,\n"distributedInfo": {{{world}}},\n"traceEvents": [\n')
        file.write(",\n".join(lines))
        file.write(f'\n],\n"traceName": "rank{timeline.rank}"\n}}\n')
    return len(lines)


def _event(category: str, name: str, tid: int, begin_us: float, taken_us: float, args: str) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": {0 if category == "kernel" else 1000}, '
        f'"tid": {tid}, "ts": {begin_us:.3f}, "dur": {taken_us:.3f}, "args": {{{args}}}}}'
    )


def _steps(timeline: Timeline) -> Iterator[str]:
    begins_us = timeline.step_begins_ns / NS_PER_US
    taken_us = timeline.step_ends_ns / NS_PER_US - begins_us
    for step, (begin_us, step_us) in enumerate(zip(begins_us.tolist(), taken_us.tolist(), strict=True)):
        # HolisticTraceAnalysis leaves out step 0.
        yield _event("user_annotation", f"ProfilerStep#{step + 1}", 1000, begin_us, step_us, f'"External id": {step}')


def _operations(timeline: Timeline) -> Iterator[str]:
    columns = (
        timeline.compute_ns / NS_PER_US, timeline.enter_ns / NS_PER_US, timeline.exit_ns / NS_PER_US, timeline.group,
        timeline.size_bytes // 4,
    )  # fmt: skip
    for number, (compute_us, enter_us, exit_us, group, num_elements) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        correlation = 2 * number + 1
        if compute_us < enter_us:
            launched = partial(_launched, compute_us, enter_us, correlation, _COMPUTE_STREAM)
            yield from launched("aten::mm", _COMPUTE, "")
        ranks = timeline.members[group]
        yield from _launched(
            enter_us, exit_us, correlation + 1, _FIRST_GROUP_STREAM + group, "record_param_comms", _KERNEL,
            f', "Collective name": "allreduce", "In msg nelems": {num_elements}, "Out msg nelems": {num_elements}, '
            f'"Group size": {len(ranks)}, "dtype": "Float", "In split size": "[]", "Out split size": "[]", '
            f'"Process Group Name": "{group}", "Process Group Ranks": "{ranks}"',
        )  # fmt: skip


def _launched(
    begin_us: float, end_us: float, correlation: int, stream: int, operator: str, kernel: str, more: str
) -> Iterator[str]:
    """Yield the operator, the launch and the kernel of one piece of work, the first two just before the third."""
    external = f'"External id": {correlation}'
    yield _event("cpu_op", operator, 1000, begin_us, 2 * _LAUNCH_US, external)
    args = f'{external}, "cbid": 211, "correlation": {correlation}'
    yield _event("cuda_runtime", "cudaLaunchKernel", 1000, begin_us + 1.0, _LAUNCH_US, args)
    args = f'{external}, "device": 0, "stream": {stream}, "correlation": {correlation}{more}'
    yield _event("kernel", kernel, stream, begin_us, end_us - begin_us, args)


_WHAT_IF_COLUMNS = ("step", "seq_id", "mc", "mb_id", "gmc", "start_ts", "duration", "dp_rank", "stage", "rank")


def write_what_if(folder: Path, timelines: Sequence[Timeline]) -> int:
    """Write rows.npz of ranks in data parallelism, and return the number of rows.

    Of each step the last operation is the one that the optimizer waits for, the others are buckets of gradients that
    overlap with the backward pass. Half of the computation before the first one is the forward pass.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[np.ndarray]] = {}
    origin_ns = min(int(timeline.step_begins_ns[0]) for timeline in timelines)
    for timeline in timelines:
        for optype, rows in _rows(timeline, origin_ns):
            parts.setdefault(optype, []).append(rows)
    kinds = {optype: np.concatenate(rows) for optype, rows in parts.items()}
    kind = np.repeat(np.arange(len(kinds), dtype=np.uint8), [len(rows) for rows in kinds.values()])
    table = np.concatenate(list(kinds.values()))
    np.savez(folder / "rows.npz", names=list(kinds), optype=kind, **{name: table[name] for name in _WHAT_IF_COLUMNS})
    return len(table)


def _rows(timeline: Timeline, origin_ns: int) -> list[tuple[str, np.ndarray]]:
    num_steps = len(timeline.step_begins_ns)
    shape = (num_steps, -1)
    compute_ns, enter_ns, exit_ns = (
        column.reshape(shape) for column in (timeline.compute_ns, timeline.enter_ns, timeline.exit_ns)
    )
    half_ns = (compute_ns[:, :1] + enter_ns[:, :1]) // 2
    backward_ns = np.concatenate([half_ns, compute_ns[:, 1:]], axis=1)
    pieces = np.arange(compute_ns.shape[1])
    computed_ns = enter_ns[:, -1:]
    # Collectives of a group run one after the other.
    free_ns = np.maximum(computed_ns, exit_ns[:, -2:-1])
    end_ns = np.maximum(exit_ns[:, -1:], free_ns)

    def rows(begins_ns: np.ndarray, ends_ns: np.ndarray, mc: np.ndarray | int = -1, mb_id: int = -1) -> np.ndarray:
        made = np.zeros(
            begins_ns.shape, [(name, "f8" if name in _WHAT_IF_COLUMNS[5:7] else "i8") for name in _WHAT_IF_COLUMNS]
        )
        made["step"], made["seq_id"] = np.arange(num_steps)[:, None], np.arange(begins_ns.shape[1])
        made["mc"], made["mb_id"], made["gmc"] = mc, mb_id, mc
        made["start_ts"] = (begins_ns - origin_ns) / NS_PER_S
        made["duration"] = (ends_ns - begins_ns) / NS_PER_S
        made["dp_rank"] = made["rank"] = timeline.rank
        return made.reshape(-1)

    return [
        ("forward-compute", rows(compute_ns[:, :1], half_ns, mc=0, mb_id=0)),
        ("backward-compute", rows(backward_ns, enter_ns, mc=pieces, mb_id=0)),
        ("grads-reduce-scatter", rows(enter_ns[:, :-1], exit_ns[:, :-1], mc=pieces[:-1])),
        ("gc", rows(computed_ns, computed_ns)),
        ("layernorm-grads-all-reduce", rows(free_ns, free_ns)),
        ("embedding-grads-all-reduce", rows(free_ns, free_ns)),
        ("separate-grads-all-reduce", rows(free_ns, end_ns)),
        ("optimizer-clip-main-grad", rows(end_ns, end_ns)),
        ("optimizer", rows(end_ns, np.maximum(end_ns, timeline.step_ends_ns[:, None]))),
    ]
