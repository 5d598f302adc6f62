"""Flight Recorder dumps as PyTorch writes them, made to order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN_NS = 1_758_610_505_000_000_000
MS = 1_000_000


def entry(number: int, called: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    """Return an operation that has finished, unless its `state` says otherwise."""
    created_ns = BEGIN_NS + number * 10 * MS
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "thread_id": "139",
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": f"nccl:{called}",
        "time_created_ns": created_ns,
        "input_sizes": [[16, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[16, 2]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": created_ns + MS,
        "time_discovered_completed_ns": created_ns + 2 * MS,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "step", "filename": "train.py", "line": 44},
        ],
        **changes,
    }


def unfinished(number: int, called: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    """Return an operation that has not finished."""
    over = {"state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    return entry(number, called, **{**over, "retired": False, **changes})


def dump(
    entries: Sequence[Mapping[str, Any]],
    *,
    world: int = 4,
    groups: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return a dump of a job; `groups` has the descriptions and ranks of those but the default group, by name."""
    described = {"0": ("default_pg", range(world)), **(groups or {})}
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": text, "ranks": str(list(ranks))} for name, (text, ranks) in described.items()
        },
        "comm_lib_version": "2.27.3",
        "pg_status": {
            "0": {
                "last_enqueued_collective": len(entries),
                "last_started_collective": -1,
                "last_completed_collective": sum(one["state"] == "completed" for one in entries),
            }
        },
        "entries": list(entries),
        **changes,
    }


def write(folder: Path, contents: Mapping[str, Any]) -> Path:
    """Write dumps by file name, as JSON where the name says so."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        is_json = name.endswith(".json")
        (folder / name).write_bytes(json.dumps(content).encode() if is_json else pickle.dumps(content, 2))
    return folder


def hung_job(world: int = 4, missing: int = 2) -> dict[str, Any]:
    """Return the dumps of a job in which one rank has not come to the last all_reduce."""
    done = [entry(number) for number in range(5)]
    return {
        f"nccl_trace_rank_{rank}": dump(done if rank == missing else [*done, unfinished(5)], world=world)
        for rank in range(world)
    }
