"""The passes of a pipeline as a graph: when its last backward pass ends.

The schedule is one forward, one backward (1F1B; Narayanan et al. 2019, PipeDream-Flush): a stage runs as many forward
passes ahead as there are stages behind it, and then takes turns. Each pass waits for the stage's last one and for its
data. After as many microbatches as it takes to fill the pipeline, each further one costs what the slowest stage works
for it, so only those are walked.
"""

from __future__ import annotations

import numpy as np

from hpcpace.metrics import Floats, Ints

_WALKED = 3
"""Microbatches that are walked, for each stage: two fill a pipeline, the third shows what each further one costs."""

_MAX_STAGES = 128
"""speed: of a pipeline that is walked, which takes a second; deeper ones are filled as if their stages were equal."""


def pipeline_s(forward_s: Floats, backward_s: Floats, transfer_s: Floats, num_micro: Ints) -> Floats:
    """Return how long pipelines of equally many stages take, float64, (num_layouts,).

    Args:
        forward_s, backward_s: of one microbatch on each stage, float64, (num_layouts, num_stages).
        transfer_s: of a microbatch's activations from each stage to the next, and of their gradients back, float64,
            (num_layouts, num_stages - 1); the stage that receives is busy with it.
        num_micro: microbatches, int64, (num_layouts,).
    """
    num_layouts, num_stages = forward_s.shape
    if num_stages == 1:
        return np.asarray(num_micro * (forward_s + backward_s)[:, 0])
    received_s = np.pad(transfer_s, ((0, 0), (1, 0))) + np.pad(transfer_s, ((0, 0), (0, 1)))
    slowest_s = (forward_s + backward_s + received_s).max(axis=1)
    if num_stages > _MAX_STAGES:
        return np.asarray((forward_s + backward_s + received_s).sum(axis=1) + (num_micro - 1) * slowest_s)
    found = np.empty(num_layouts)
    walked = np.minimum(num_micro, _WALKED * num_stages)
    for count in np.unique(walked):
        which = walked == count
        ends_s = walk_s(forward_s[which], backward_s[which], transfer_s[which], int(count))
        found[which] = ends_s + (num_micro[which] - count) * slowest_s[which]
    return found


def walk_s(forward_s: Floats, backward_s: Floats, transfer_s: Floats, num_micro: int) -> Floats:
    """Return when the last pass ends, pass by pass, float64, (num_layouts,); arguments as of `pipeline_s`."""
    num_layouts, num_stages = forward_s.shape
    free = np.zeros((num_stages, num_layouts))
    ends = np.zeros((2, num_stages, num_micro, num_layouts))  # of forward passes, then of backward ones
    orders = [_order(num_stages - 1 - stage, num_micro) for stage in range(num_stages)]
    done = np.zeros((2, num_stages), np.int64)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                is_backward, micro = order[-1]
                source = stage + 1 if is_backward else stage - 1
                has_source = 0 <= source < num_stages
                if has_source and done[is_backward, source] <= micro:
                    break
                start = free[stage]
                if has_source:
                    start = np.maximum(start, ends[is_backward, source, micro]) + transfer_s[:, min(source, stage)]
                work_s = (backward_s if is_backward else forward_s)[:, stage]
                ends[is_backward, stage, micro] = free[stage] = start + work_s
                done[is_backward, stage] += 1
                order.pop()
    return np.asarray(free.max(axis=0))


def _order(num_ahead: int, num_micro: int) -> list[tuple[int, int]]:
    """Return the passes of a stage, last first: whether backward, and of which microbatch."""
    ahead = min(num_ahead, num_micro)
    turns = [turn for micro in range(num_micro - ahead) for turn in ((0, micro + ahead), (1, micro))]
    return [
        *((0, micro) for micro in range(ahead)),
        *turns,
        *((1, micro) for micro in range(num_micro - ahead, num_micro)),
    ][::-1]
