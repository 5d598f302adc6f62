"""Whether work varies with the data: a microbatch that takes long on one stage takes long on the others, too.

Stages of a pipeline work on the same microbatch at different times and on different devices. What they have in common
within a step, beyond the place in the schedule, comes from the microbatch itself, such as the lengths of its sequences.
Noise of hosts, networks and clocks is not in common, and a rank that is slow for a whole step is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Int64Array = NDArray[np.int64]

_LEAST_PASSES = 100


@dataclass(frozen=True, kw_only=True)
class DataVariation:
    """How work varies from microbatch to microbatch.

    Attributes:
        shared: correlation between neighbouring stages of a replica, median over these pairs: 1 if all of the variation
            comes with the microbatch, 0 if none does.
        spread: standard deviation of the work of a pass within a step, relative to it, median over ranks.
        num_passes: passes compared in each pair.
    """

    shared: float
    spread: float
    num_passes: int


def data_variation(own_ns: FloatArray, stage: Int64Array, replica: Int64Array) -> DataVariation | None:
    """Return how work varies; None without two stages, two microbatches a step, or a hundred passes to compare.

    Args:
        own_ns: work in each pass, above 0, float64, (num_ranks, num_kinds, num_steps, num_microbatches).
        stage: pipeline stage of each rank, int64, (num_ranks,).
        replica: of each rank, ranks of a replica share their data, int64, (num_ranks,).
    """
    num_kinds, num_steps, num_microbatches = own_ns.shape[1:]
    num_passes = num_kinds * num_steps * num_microbatches
    pairs = [
        (first, second)
        for first in range(len(stage))
        for second in np.flatnonzero((replica == replica[first]) & (stage == stage[first] + 1))[:1].tolist()
    ]
    if not pairs or num_microbatches < 2 or num_passes < _LEAST_PASSES or not (own_ns > 0).all():
        return None
    logs = np.log(own_ns)
    logs = logs - logs.mean(axis=2, keepdims=True)  # the place in the schedule
    logs = logs - logs.mean(axis=3, keepdims=True)  # the step
    varying = logs.reshape(len(logs), num_kinds, -1)
    spread = varying.std(axis=2)
    standard = varying / np.maximum(spread[:, :, None], 1e-12)
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    shared = (standard[first] * standard[second]).mean(axis=(1, 2))
    return DataVariation(
        shared=float(np.median(shared)), spread=float(np.median(spread.mean(axis=1))), num_passes=num_passes
    )
