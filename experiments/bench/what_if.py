"""Writes the records of a run as the what-if analyzer of ByteDance Seed reads them.

It is the artifact of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): it takes
one row for each piece of computation and each collective of a Megatron step, and simulates the step without stragglers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.bench.timeline import Timeline
from hpcpace.core.text import NS_PER_S

_COLUMNS = ("step", "seq_id", "mc", "mb_id", "gmc", "start_ts", "duration", "dp_rank", "stage", "rank")


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
    np.savez(folder / "rows.npz", names=list(kinds), optype=kind, **{name: table[name] for name in _COLUMNS})
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
        made = np.zeros(begins_ns.shape, [(name, "f8" if name in _COLUMNS[5:7] else "i8") for name in _COLUMNS])
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
