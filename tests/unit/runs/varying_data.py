"""A trace of the what-if analysis whose microbatches differ in length, replica by replica, and one whose noise does."""

from __future__ import annotations

import numpy as np
import pandas as pd

NUM_REPLICAS, NUM_STAGES, NUM_STEPS, NUM_MICROBATCHES = 4, 2, 24, 4


def gpipe(spread: float, *, is_data: bool) -> pd.DataFrame:
    """Return the operations of a two-stage pipeline, all forward passes first; work varies by `spread`.

    Args:
        spread: standard deviation of logarithms.
        is_data: whether both stages of a replica have it in common, microbatch by microbatch.
    """
    rng = np.random.default_rng(11)
    shape = (NUM_STEPS, NUM_REPLICAS, 1 if is_data else NUM_STAGES, NUM_MICROBATCHES)
    factor = np.broadcast_to(np.exp(spread * rng.normal(size=shape)), (*shape[:2], NUM_STAGES, NUM_MICROBATCHES))
    rows: list[tuple[object, ...]] = []
    for step in range(NUM_STEPS):
        ends = [_replica(rows, step, dp, factor[step, dp]) for dp in range(NUM_REPLICAS)]
        done = max(max(of_replica) for of_replica in ends) + 0.02
        for dp, of_replica in enumerate(ends):
            for stage, end in enumerate(of_replica):
                place = (dp, stage, stage * NUM_REPLICAS + dp, step)
                rows.append((*place, "grads-reduce-scatter", end, done - end, 0, -1, -1, -1))
                rows.append((*place, "optimizer", done, 0.01, 0, -1, -1, -1))
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id"]
    return pd.DataFrame(rows, columns=names)


def _replica(rows: list[tuple[object, ...]], step: int, dp: int, factor: np.ndarray) -> list[float]:
    """Add the passes and messages of one replica, and return when each stage has done its work."""
    free = [0.0, 0.0]

    def add(stage: int, optype: str, begin: float, end: float, number: int, microbatch: int = -1) -> None:
        rank = stage * NUM_REPLICAS + dp
        rows.append((dp, stage, rank, step, optype, begin, end - begin, number, 0, stage, microbatch))

    for kind, base in (("forward", 0.1), ("backward", 0.2)):
        first, second = (0, 1) if kind == "forward" else (1, 0)
        for number in range(NUM_MICROBATCHES):
            end = free[first] + base * factor[first, number]
            add(first, f"{kind}-compute", free[first], end, number, number)
            arrived = max(end, free[second]) + 0.001
            add(first, f"{kind}-send", end, arrived, number)
            add(second, f"{kind}-recv", free[second], arrived, number)
            free[first], free[second] = arrived, arrived + base * factor[second, number]
            add(second, f"{kind}-compute", arrived, free[second], number, number)
    return free
