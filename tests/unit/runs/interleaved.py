"""A trace of the what-if analysis with two model chunks a stage, of which one worker is slow."""

from __future__ import annotations

import pandas as pd

NUM_REPLICAS, NUM_STAGES, NUM_CHUNKS, NUM_STEPS, NUM_MICROBATCHES = 3, 2, 2, 24, 4
NUM_PLACES = NUM_STAGES * NUM_CHUNKS
"""Chunks of the whole model."""
MESSAGE_S, CALL_S = 0.001, 1e-6


def interleaved(*, slow: tuple[int, int], factor: float) -> pd.DataFrame:
    """Return the operations of an interleaved pipeline, all forward passes first.

    As the recorder does, each piece of work has a receive before it and a send after it, whether there was one or not;
    only the very first receive of a step is missing.

    Args:
        slow: replica and stage of the slow worker.
        factor: by which its work is longer.
    """
    rows: list[tuple[object, ...]] = []
    for step in range(NUM_STEPS):
        free = {(dp, stage): 0.0 for dp in range(NUM_REPLICAS) for stage in range(NUM_STAGES)}
        for dp in range(NUM_REPLICAS):
            factors = [factor if (dp, stage) == slow else 1.0 for stage in range(NUM_STAGES)]
            _replica(rows, step, dp, free, factors)
        for (dp, stage), end in free.items():
            done = max(free[other, stage] for other in range(NUM_REPLICAS)) + 0.02
            worker = (dp, stage, stage * NUM_REPLICAS + dp, step)
            rows.append((*worker, "grads-reduce-scatter", end, done - end, 0, 0, -1, -1))
            rows.append((*worker, "optimizer", done, 0.01, 0, -1, -1, -1))
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id"]
    found = pd.DataFrame(rows, columns=names)
    found["seq_id"] = found.sort_values("start_ts", kind="stable").groupby(["rank", "step", "optype"]).cumcount()
    return found


def _replica(
    rows: list[tuple[object, ...]], step: int, dp: int, free: dict[tuple[int, int], float], factors: list[float]
) -> None:
    def add(stage: int, optype: str, begin: float, end: float, chunk: int = -1, microbatch: int = -1) -> None:
        place = chunk * NUM_STAGES + stage if chunk >= 0 else -1
        worker = (dp, stage, stage * NUM_REPLICAS + dp, step)
        rows.append((*worker, optype, begin, end - begin, 0, chunk, place, microbatch))

    for kind, base in (("forward", 0.1), ("backward", 0.2)):
        ended: dict[tuple[int, int], float] = {}
        places = range(NUM_PLACES) if kind == "forward" else reversed(range(NUM_PLACES))
        for order, place in enumerate(places):
            chunk, stage = divmod(place, NUM_STAGES)
            before = place - 1 if kind == "forward" else place + 1
            for microbatch in range(NUM_MICROBATCHES):
                begin = free[dp, stage]
                if order:
                    sent = ended[before, microbatch]
                    arrived = max(sent + MESSAGE_S, begin + CALL_S)
                    add(before % NUM_STAGES, f"{kind}-send", sent, sent + MESSAGE_S)
                    add(stage, f"{kind}-recv", begin, arrived)
                    begin = arrived
                elif microbatch:
                    add(stage, f"{kind}-recv", begin, begin + CALL_S)
                end = begin + base * factors[stage]
                add(stage, f"{kind}-compute", begin, end, chunk, microbatch)
                free[dp, stage] = ended[place, microbatch] = end
                if order == NUM_PLACES - 1:
                    add(stage, f"{kind}-send", end, end + CALL_S)
