"""Runs as comparisons take them, made up: four hosts of a rank each that wait for the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcpace.runs.measured import Conditions, MeasuredRun, RankTimes, Transfers

MS = 1_000_000.0
HOSTS = ("n0", "n1", "n2", "n3")
TRANSFER = 5 * MS


def sample_run(
    path: str = "runs/a",
    *,
    work: Sequence[float] = (100.0, 100.0, 100.0, 100.0),
    hosts: Sequence[str] = HOSTS,
    roles: Sequence[str] = (),
    error: float = 0.001,
    conditions: Conditions | None = None,
    **changes: Any,
) -> MeasuredRun:
    """Return a run whose ranks work for some milliseconds each, and then wait for the slowest."""
    longest = max(work)
    ranks = [
        RankTimes(
            rank=rank,
            host=hosts[rank],
            role=roles[rank] if roles else "all",
            parts_ns={"forward": own * MS, "wait": (longest - own) * MS, "transfer": TRANSFER},
            work_ns=own * MS,
            work_error=error,
            caused_wait_ns=sum(longest - other for other in work) / len(work) * MS if own == longest else 0.0,
        )
        for rank, own in enumerate(work)
    ]
    step_ns = longest * MS + TRANSFER
    values: dict[str, Any] = {
        "path": path,
        "attempt": 0,
        "is_from_summary": True,
        "is_final": True,
        "p50_ns": step_ns,
        "mean_ns": step_ns * 1.01,
        "log_p50_error": error,
        "log_mean_error": 2 * error,
        "block_p50_ns": (step_ns,) * 5,
        "cv": 0.01,
        "samples_per_s": 64e9 / step_ns,
        "samples_per_step": 64.0,
        "samples_unit": "tokens",
        "num_steps": 50,
        "world_size": len(work),
        "num_missing": 0,
        "hosts": tuple(hosts),
        "mesh": f"dp={len(work)}",
        "ranks": tuple(ranks),
        "transfers": (Transfers(op="all_reduce", group_size=len(work), transfer_ns=TRANSFER, size_bytes=4096.0),),
        "shares": (0.9, 0.0, 0.05, 0.05),
        "amplification": (),
        "audit": (),
        "mode": "healthy",
        "conditions": conditions or Conditions(),
    }
    return MeasuredRun(**{**values, **changes})
