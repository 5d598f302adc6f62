"""What jitter would cost if it hit each rank or node independently.

The null model removes shared and lasting parts from the work and shuffles the rest over the steps, independently for
each unit. A measured loss below the null means that some ranks share a cause; a loss above it means that their events
avoid each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.jitter.variance_shares import SharedNoise, WorkParts, deal, dealt, split_work
from hpcpace.metrics.resampling import block_length, lag_one

MOST_ELEMENTS = 160_000_000
"""The most values that all draws of a null model may shuffle together; beyond it, fewer draws are made."""
FEWEST_DRAWS = 39
"""Draws that are always made: the two outermost of them bound 95 %."""
_NUM_UNSHARED_DRAWS = 3


class Comparison(StrEnum):
    """How a measured loss compares with that of independent units."""

    BELOW = "below"
    WITHIN = "within"
    ABOVE = "above"


@dataclass(frozen=True, kw_only=True)
class NullModel:
    """The measured loss against that of independent units.

    Attributes:
        observed_loss_ns: E[max] - E[mean] per step, summed over segments.
        expected_loss_ns: the same for independent units, mean over draws.
        low_ns, high_ns: interval of 95 % of the draws.
        unshared_loss_ns: the loss if what all ranks share also hit each unit independently; far above the measured loss
            if the noise is common mode.
        observed, expected, low, high: the same losses as amplification, 1 + loss / mean work.
        comparison: where the measured loss is: outside the interval by more than the tolerance, or within it. The
            tolerance is weight / num_units of the expected loss, because few units cannot separate what they share
            from their own noise.
        p_value: two-sided, allowing for the tolerance; at least 1 / (num_draws + 1).
        num_draws: draws made, fewer than asked for if the data are large.
        is_node_unit: whether nodes, not ranks, were taken as independent units.
        num_units: number of units.
        shared: how the units were chosen.
    """

    observed_loss_ns: float
    expected_loss_ns: float
    low_ns: float
    high_ns: float
    unshared_loss_ns: float
    observed: float
    expected: float
    low: float
    high: float
    comparison: Comparison
    p_value: float
    num_draws: int
    is_node_unit: bool
    num_units: int
    shared: SharedNoise


def null_model(
    work_ns: NDArray[np.float64],
    node: NDArray[np.int64],
    *,
    parts: WorkParts | None = None,
    seed: int = 0,
    num_draws: int = 199,
) -> NullModel | None:
    """Return the loss that independent units would have, and how the measured loss compares.

    Each unit's residuals are shuffled over the steps independently, in the same way for all its segments and ranks, and
    in blocks if they are serially correlated. Rank effects are added back.

    Args:
        work_ns: c_irj, float64, (num_ranks, num_steps, num_segments).
        node: index of the host, int64, (num_ranks,).
        parts: the parts of the work; computed if None.
        seed: of the generator.
        num_draws: draws asked for; at least 39 are made, and no more than fit into 160 million values.

    Returns:
        None for fewer than 2 units, fewer than 8 steps, or no work.
    """
    parts = parts or split_work(work_ns, node, seed=seed)
    mean_ns = float(work_ns.mean(axis=(0, 1)).sum()) if work_ns.size else 0.0
    if parts is None or parts.num_units < 2 or work_ns.shape[1] < 8 or mean_ns <= 0.0:
        return None
    num_draws = min(num_draws, max(FEWEST_DRAWS, MOST_ELEMENTS // work_ns.size))
    generator = np.random.default_rng([seed, 1])
    length = serial_length(parts.residual_ns)

    def losses_ns(values: NDArray[np.float64], num_draws: int) -> NDArray[np.float64]:
        losses = np.empty(num_draws)
        for draw in range(num_draws):
            order = deal(parts.num_units, work_ns.shape[1], length, generator)[parts.unit]
            losses[draw] = dealt(values, order).max(axis=0).mean(axis=0).sum() - mean_ns
        return losses

    base_ns = float(parts.location_ns.mean(axis=0).sum())
    return _compared(
        parts,
        observed_ns=float(work_ns.max(axis=0).mean(axis=0).sum()) - mean_ns,
        losses_ns=losses_ns(parts.residual_ns + parts.rank_effect_ns[:, np.newaxis], num_draws) + base_ns,
        unshared_ns=float(losses_ns(work_ns, _NUM_UNSHARED_DRAWS).mean()),
        mean_ns=mean_ns,
    )


def serial_length(residual_ns: NDArray[np.float64]) -> int:
    """Return how many steps stay together when residuals are shuffled: 1 unless neighbours correlate above 0.1.

    Args:
        residual_ns: float64, (num_ranks, num_steps, num_segments).
    """
    correlation = lag_one(residual_ns.sum(axis=2).T)
    return block_length(residual_ns.shape[1], correlation, shortest=1) if correlation > 0.1 else 1


def _compared(
    parts: WorkParts, *, observed_ns: float, losses_ns: NDArray[np.float64], unshared_ns: float, mean_ns: float
) -> NullModel:
    expected = float(losses_ns.mean())
    low, high = (float(value) for value in np.quantile(losses_ns, (0.025, 0.975)))
    tolerance = float(parts.weight.max()) / parts.num_units * abs(expected)
    # Allow for rounding: with constant work all losses are equal.
    allowed = tolerance + 1e-9 * mean_ns
    if observed_ns > high + allowed:
        comparison = Comparison.ABOVE
    elif observed_ns < low - allowed:
        comparison = Comparison.BELOW
    else:
        comparison = Comparison.WITHIN
    as_far = int((np.abs(losses_ns - expected) >= abs(observed_ns - expected) - allowed).sum())
    return NullModel(
        observed_loss_ns=observed_ns,
        expected_loss_ns=expected,
        low_ns=low,
        high_ns=high,
        unshared_loss_ns=unshared_ns,
        observed=1 + observed_ns / mean_ns,
        expected=1 + expected / mean_ns,
        low=1 + low / mean_ns,
        high=1 + high / mean_ns,
        comparison=comparison,
        p_value=(1 + as_far) / (1 + len(losses_ns)),
        num_draws=len(losses_ns),
        is_node_unit=parts.shared.is_shared,
        num_units=parts.num_units,
        shared=parts.shared,
    )
