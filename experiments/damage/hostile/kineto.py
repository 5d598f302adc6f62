"""Profiles of torch.profiler, in files and folders of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import Call, kinds_of
from experiments.damage.hostile.json_files import kinds

_FORMAT = "profiles of torch.profiler"
# For each MB of a file and of what comes out of gzip; a rank takes 20 ms, most of them for its file of the run.
_BOUNDS: dict[str, Any] = {"most_cpu_s": 2.0, "most_cpu_s_per_mb": 0.3}


def _call(folder: Path, num_bytes: int, **expected: Any) -> Call:
    arguments = ("import", "kineto", str(folder), "--run-dir", str(folder.parent / "run"))
    return Call(arguments=arguments, num_bytes=num_bytes, never=("owned\x07",), **expected)


def _written(folder: Path, data: bytes, random: Random, **expected: Any) -> Call:
    """Write a profile of rank 0, packed in half of the cases."""
    is_packed = random.maybe()
    packed = gzip.compress(data, 1, mtime=0) if is_packed else data
    (folder / f"rank-0.json{'.gz' if is_packed else ''}").write_bytes(packed)
    return _call(folder, len(data) + len(packed), **expected)


def _event(name: str, cat: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, "args": args}


def _sound_events(num_steps: int, per_step: int = 20) -> list[dict[str, Any]]:
    """Return events of a rank with a device that reduces once a step."""
    events = []
    said = {"Collective name": "allreduce", "dtype": "Float", "Process Group Name": "0"}
    for step in range(num_steps):
        at = 1e6 + 1e4 * step
        for number in range(per_step):
            link = step * per_step + number + 1
            events.append(_event("cudaLaunchKernel", "cuda_runtime", at + number, 1, correlation=link))
            events.append(_event("gemm", "kernel", at + 10 * number + 5, 8, correlation=link))
        events.append(_event("ncclDevKernel_AllReduce", "kernel", at + 5e3, 100, Seq=step, **said))
        events.append(_event(f"ProfilerStep#{step}", "user_annotation", at, 9e3))
    return events


def _facts(rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    groups = [{"pg_name": "0", "ranks": list(range(world_size))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_config": groups}
    return {"distributedInfo": info, "host_name": "n1", "baseTimeNanoseconds": 1_700_000_000_000_000_000}


def _json(events: Iterable[object], facts: object = None) -> bytes:
    said = _facts() if facts is None else facts
    return (json.dumps(said)[:-1] + ', "traceEvents": ' + json.dumps(list(events)) + "}").encode()


def _sound(folder: Path, random: Random) -> Call:
    return _written(folder, _json(_sound_events(random.count(20, 300))), random, codes=frozenset({0}))


KINDS = (
    *kinds_of("kineto", _FORMAT, [_sound], **_BOUNDS),
    *kinds("kineto-json", _FORMAT, lambda _: json.loads(_json(_sound_events(20))), _written, **_BOUNDS),
)
