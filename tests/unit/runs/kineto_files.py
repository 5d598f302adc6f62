"""Profiles of torch.profiler with known truth: ranks that train with DDP over gloo, or over NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_STEPS, STEP_US, REDUCED_US = 24, 10_000.0, 2_000.0


def event(name: str, cat: str, begin_us: float, end_us: float, **args: Any) -> dict[str, Any]:
    """Return a complete event."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": args,
    }


def gloo_events(
    rank: int, *, late_us: float = 0.0, offset_us: float = 0.0, with_steps: bool = True
) -> list[dict[str, Any]]:
    """Return the events of one rank; rank 0 arrives late by `late_us`, and all wait for it."""
    events: list[dict[str, Any]] = []
    for step in range(NUM_STEPS):
        at = 1_000_000.0 + step * (STEP_US + late_us) + offset_us
        reach = at + 5_000 + (late_us if rank == 0 else 0.0)
        done = at + 5_000 + late_us + REDUCED_US
        events += [
            event("DistributedDataParallel.forward", "user_annotation", at, at + 2_000),
            event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", at + 2_000, reach),
            event("c10d::allreduce_", "cpu_op", reach - 100, reach),
            event("gloo:all_reduce", "user_annotation", reach - 50, done),
            event("Optimizer.step#SGD.step", "user_annotation", done, done + 1_000),
        ]
        if with_steps:
            events.append(event(f"ProfilerStep#{step + 3}", "user_annotation", at, at + STEP_US + late_us))
    return events


def sharded_events(rank: int, *, late_us: float = 0.0) -> list[dict[str, Any]]:
    """Return the events of one rank with sharded parameters: it waits for a gather before its forward pass, and in a
    function of autograd for a sum of gradients. Rank 0 gets to the gather late by `late_us`.
    """
    events: list[dict[str, Any]] = []
    for step in range(NUM_STEPS):
        at = 1_000_000.0 + step * (STEP_US + late_us)
        enter, gathered = at + (late_us if rank == 0 else 0.0), at + late_us + REDUCED_US
        reach, done = gathered + 4_000, gathered + 4_000 + REDUCED_US
        events += [
            event("c10d::_allgather_base_", "cpu_op", enter, enter + 10),
            event("gloo:all_gather", "user_annotation", enter + 5, gathered),
            event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", gathered + 2_000, reach - 10),
            event("autograd::engine::evaluate_function: RegisterPostBackward", "cpu_op", reach - 5, done + 5),
            event("c10d::allreduce_", "cpu_op", reach, reach + 10),
            event("gloo:all_reduce", "user_annotation", reach + 5, done),
            event("Optimizer.step#SGD.step", "user_annotation", done + 100, done + 1_000),
            event(f"ProfilerStep#{step}", "user_annotation", at, at + STEP_US + late_us),
        ]
    return events


def nccl_events(rank: int, *, late_us: float = 0.0, offset_us: float = 0.0) -> list[dict[str, Any]]:
    """Return the events of one rank whose device works and reduces; `late_us` and `offset_us` as in `gloo_events`."""
    events: list[dict[str, Any]] = []
    for step in range(NUM_STEPS):
        at = 1_000_000.0 + step * (STEP_US + late_us) + offset_us
        reach = at + 6_000 + (late_us if rank == 0 else 0.0)
        done = at + 6_000 + late_us + REDUCED_US
        kernels = (
            ("gemm_forward", at + 500, at + 3_000),
            ("gemm_backward", at + 3_000, reach),
            ("adam", done, done + 500),
        )
        for number, (name, begin, end) in enumerate(kernels):
            link = step * 10 + number
            launched = at + (100, 1_100, 2_100)[number]
            events.append(event("cudaLaunchKernel", "cuda_runtime", launched, launched + 5, correlation=link))
            events.append(event(name, "kernel", begin, end, correlation=link))
        facts = {"Collective name": "allreduce", "Out msg nelems": 1000, "dtype": "Float", "Process Group Name": "0"}
        link = step * 10 + 5
        events.append(event("cudaLaunchKernel", "cuda_runtime", at + 1_500, at + 1_505, correlation=link))
        events.append(event("ncclDevKernel_AllReduce", "kernel", reach, done, correlation=link, Seq=step, **facts))
        events += [
            event("DistributedDataParallel.forward", "user_annotation", at, at + 1_000),
            event("## backward ##", "user_annotation", at + 1_000, at + 2_000),
            event("Optimizer.step#Adam.step", "user_annotation", at + 2_000, at + 2_500),
            event(f"ProfilerStep#{step}", "user_annotation", at, at + STEP_US + late_us),
        ]
    return events


def rccl_events(
    rank: int, *, late_us: float = 0.0, name: str = "ncclDevKernel_Generic_4(x)", by_time: bool = False, lost: int = 0
) -> list[dict[str, Any]]:
    """Return the events of `nccl_events` as of AMD's GPUs: only calls of the host say what kernels of RCCL do.

    Args:
        rank, late_us: as there.
        name: of all kernels of RCCL.
        by_time: whether only their launches, and no numbers, say which call kernels are of.
        lost: of the first steps, calls and launches are not there: they were before the profile.
    """
    events: list[dict[str, Any]] = []
    for one in nccl_events(rank, late_us=late_us):
        args = one["args"]
        if one["name"] == "cudaLaunchKernel":
            one["name"] = "hipExtLaunchKernel"
            if args["correlation"] % 10 == 5 and args["correlation"] < 10 * lost:
                continue
        if one["name"].startswith("nccl"):
            link, step = args.pop("correlation"), args["Seq"]
            number = {} if by_time else {"External id": 1000 + step}
            if step >= lost:
                launched = 1_000_000.0 + step * (STEP_US + late_us) + 1_500
                call = event("record_param_comms", "cpu_op", launched - 20, launched + 20, **args, **number)
                events += [call, event("c10d::allreduce_", "cpu_op", launched - 30, launched + 30)]
            one |= {"name": name, "args": {"correlation": link} | (number if step >= lost else {})}
        events.append(one)
    return events


def kernel_by_kernel(*, kernel_us: float, every_us: float, is_ahead: bool) -> list[dict[str, Any]]:
    """Return the events of a rank whose device runs 40 kernels in each of forward and backward and then reduces.

    Args:
        kernel_us: how long a kernel lasts, but for the first of a pass, which lasts three times as long.
        every_us: time between launches; the device waits for them, unless the host is ahead.
        is_ahead: whether the host launches all of a pass at once, and then waits for the device.
    """
    events: list[dict[str, Any]] = []
    link, at = 0, 1_000_000.0
    for step in range(NUM_STEPS):
        begin_us, reach = at, at
        for name in ("DistributedDataParallel.forward", "## backward ##"):
            since_us, launched = max(at, reach) if is_ahead else at, at
            for number in range(40):
                link, launched = link + 1, since_us + (2.0 if is_ahead else every_us) * number
                reach = max(reach, launched + 3.0) + kernel_us * (1 if number else 3)
                begins_us = reach - kernel_us * (1 if number else 3)
                events.append(event("cudaLaunchKernel", "cuda_runtime", launched, launched + 1, correlation=link))
                events.append(event("gemm", "kernel", begins_us, reach, correlation=link))
            at = max(reach if is_ahead else launched + every_us, reach)
            events.append(event(name, "user_annotation", since_us, at))
        link += 1
        said = {"Collective name": "allreduce", "Out msg nelems": 1000, "dtype": "Float", "Process Group Name": "0"}
        events.append(event("cudaLaunchKernel", "cuda_runtime", at, at + 1, correlation=link))
        events.append(event("ncclDevKernel_AllReduce", "kernel", at + 3, at + 23, correlation=link, Seq=step, **said))
        at += 25
        events.append(event(f"ProfilerStep#{step}", "user_annotation", begin_us, at))
    return events


def facts(rank: int, world_size: int = 2, *, backend: str = "gloo", host: str = "n1") -> dict[str, Any]:
    """Return what a profile says of its rank."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": list(range(world_size))}]
    info = {"backend": backend, "rank": rank, "world_size": world_size, "pg_count": 1, "pg_config": groups}
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "host_name": host,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }


def write(path: Path, events: list[dict[str, Any]], said: dict[str, Any]) -> Path:
    """Write a profile."""
    path.write_text(json.dumps({**said, "traceEvents": events}))
    return path
