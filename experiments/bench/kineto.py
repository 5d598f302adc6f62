"""Writes the records of a run as PyTorch's profiler would have: one JSON file per rank.

All times are on the common clock, so that a reader need not align ranks. Each collective is a kernel on the stream of
its group, its launch and the operator that asked for it; what a rank computes before one is a kernel with the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from experiments.bench.timeline import Timeline
from hpcpace.core.text import NS_PER_US

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
