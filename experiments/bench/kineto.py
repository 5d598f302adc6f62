"""The records of a run as the traces that PyTorch's profiler would have left: one JSON file for each rank.

All times are on the common clock, so that a reader need not align ranks. Each collective is a kernel on the stream of
its group, its launch and the operator that asked for it; what a rank computes before one is a kernel with the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hpcpace.diagnosis.evidence import Evidence, reference_times
from hpcpace.units import NS_PER_US

# The prefix that HolisticTraceAnalysis 0.5.0 looks for when it seeks stragglers; NCCL since 2.19 says ncclDevKernel.
_KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
_COMPUTE = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3"
_COMPUTE_STREAM, _FIRST_GROUP_STREAM = 7, 20
_LAUNCH_US = 4.0
_HELD_NS = 20 * NS_PER_US


def write_kineto(folder: Path, evidence: Evidence) -> int:
    """Write the traces of all ranks, and return the number of events in them.

    Args:
        folder: where to; made if need be.
        evidence: a run whose operations are all-reduces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_events = 0
    for index, rank in enumerate(evidence.ranks):
        lines = [*_steps(evidence, index), *_operations(evidence, index)]
        num_events += len(lines)
        world = f'"backend": "nccl", "rank": {rank}, "world_size": {len(evidence.ranks)}'
        with (folder / f"rank{rank}_trace.json").open("w") as file:
            file.write(f'{{\n"schemaVersion": 1,\n"distributedInfo": {{{world}}},\n"traceEvents": [\n')
            file.write(",\n".join(lines))
            file.write(f'\n],\n"traceName": "rank{rank}"\n}}\n')
    return num_events


def _event(category: str, name: str, tid: int, begin_us: float, taken_us: float, args: str) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": {0 if category == "kernel" else 1000}, '
        f'"tid": {tid}, "ts": {begin_us:.3f}, "dur": {taken_us:.3f}, "args": {{{args}}}}}'
    )


def _steps(evidence: Evidence, index: int) -> Iterator[str]:
    steps, clock = evidence.traces[index].tables["steps"], evidence.clocks[index]
    begins_us = reference_times(clock, steps["begin_ns"]) / NS_PER_US
    taken_us = reference_times(clock, steps["end_ns"]) / NS_PER_US - begins_us
    for step, begin_us, step_us in zip(steps["step"].tolist(), begins_us.tolist(), taken_us.tolist(), strict=True):
        # HolisticTraceAnalysis leaves out step 0.
        yield _event("user_annotation", f"ProfilerStep#{step + 1}", 1000, begin_us, step_us, f'"External id": {step}')


def _operations(evidence: Evidence, index: int) -> Iterator[str]:
    done, members = evidence.operations, [list(group.ranks) for group in evidence.operations.groups]
    rows = np.flatnonzero(done.rank == evidence.ranks[index])
    rows = rows[np.argsort(done.enter_ns[rows], kind="stable")]
    steps, clock = evidence.traces[index].tables["steps"], evidence.clocks[index]
    step_begins_ns = reference_times(clock, steps["begin_ns"])[np.searchsorted(steps["step"], done.step[rows])]
    enter_ns, exit_ns = done.enter_ns[rows], done.exit_ns[rows]
    is_blocking = done.blocked_ns[rows] > 0
    free_ns = np.maximum.accumulate(np.where(is_blocking, exit_ns, enter_ns + _HELD_NS))
    compute_ns = np.maximum(np.concatenate([[0], free_ns[:-1]]), step_begins_ns)
    columns = (
        compute_ns / NS_PER_US, enter_ns / NS_PER_US, exit_ns / NS_PER_US, done.group[rows], done.size_bytes[rows] // 4,
    )  # fmt: skip
    for number, (compute_us, enter_us, exit_us, group, num_elements) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        correlation = 2 * number + 1
        if compute_us < enter_us:
            launched = partial(_launched, compute_us, enter_us, correlation, _COMPUTE_STREAM)
            yield from launched("aten::mm", _COMPUTE, "")
        ranks = members[group]
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
