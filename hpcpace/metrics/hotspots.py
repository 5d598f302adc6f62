"""Which rank, node or leaf switch is slow: each rank's excess as a sum of effects of nested units.

A slow node shows on most of its ranks and a slow leaf on most of its nodes, so an effect belongs to the highest unit
in which most units below it share it. Effects are shrunk as random effects of their level. Intervals come from the
steps only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.resampling import MAX_BLOCKS, MAX_SHORT_RHO
from hpcpace.metrics.special import ENDS_95, ROUNDING, TINY, UPPER_95, stdtr, stdtrit
from hpcpace.metrics.topology import Topology, UnitKind, unit_name

MIN_UNITS = 3
"""Statistics: with fewer units than this a level has no variance component: its effects are fixed."""
_NUM_BLOCKS = MAX_BLOCKS
_NUM_DRAWS = 400  # statistics: resamples of the steps
_MAX_HOTSPOTS = 20  # display: those with the largest effects
_KENDALL = 3  # statistics: correction of an autocorrelation in short series


@dataclass(frozen=True, kw_only=True)
class HotspotThresholds(Thresholds, topic="hotspots"):
    """When a rank, a node or a switch is listed as slower than others, whether it is named or not."""

    min_steps: int = number(10, "steps", at_least=2)
    """Steps, fewer of which have too few blocks for the noise."""
    level: float = number(0.005, "probability")
    """Chance of such an effect among all units up to which a unit is listed."""


@dataclass(frozen=True, kw_only=True)
class Hotspot:
    """One unit that takes longer than the others of its level.

    Attributes:
        kind: kind of the most specific alias.
        id: rank number, host name or switch, as text.
        effect_ns: by how much it exceeds the median of the other units of its level in the mean step, after shrinkage.
        interval_ns: 95 % interval of the effect before shrinkage.
        loss_share: share of the loss to the latest rank that would be saved without the effect.
        p_value: probability that noise of the steps gives such an effect among so many units, Bonferroni.
        aliases: units that the data cannot separate, itself included: ("node n3", "rank 5").
    """

    kind: UnitKind
    id: str
    effect_ns: float
    interval_ns: tuple[float, float]
    loss_share: float
    p_value: float
    aliases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The units of one level, in order of the units of the level above.

    Attributes:
        kind: "rank", "node" or "leaf".
        index: what `Topology` calls each unit, (num_units,).
        parent: unit of the level above, ascending, (num_units,); all 0 at the top.
        of_row: unit of each rank in order of the lowest level, ascending, (num_ranks,).
    """

    kind: UnitKind
    index: Ints
    parent: Ints
    of_row: Ints

    @property
    def is_only_child(self) -> Bools:
        """Whether each unit is the only one of the unit above, so that the two are one unit, bool, (num_units,)."""
        return np.asarray(np.bincount(self.parent)[self.parent] == 1)


@dataclass(frozen=True, kw_only=True)
class _Effects:
    """The units of one level against the median of the others.

    Attributes:
        contrast_ns: from the data in row 0, from the draws below, (1 + num_draws, num_units).
        error_ns: standard error, (num_units,).
        shrunk_ns: the contrast of row 0 after shrinkage, (num_units,).
    """

    contrast_ns: Floats
    error_ns: Floats
    shrunk_ns: Floats

    @property
    def interval_ns(self) -> Floats:
        """95 % interval around row 0, from the spread of the draws, (2, num_units)."""
        # With so few blocks the spread is uncertain, which Student's t with as many degrees of freedom allows for.
        widening = stdtrit(_NUM_BLOCKS - 1, UPPER_95) / stdtrit(np.inf, UPPER_95)
        deviation = (self.contrast_ns[1:] - self.contrast_ns[1:].mean(axis=0)) * widening
        return np.asarray(self.contrast_ns[0] + np.quantile(deviation, ENDS_95, axis=0))


def delay_hotspots(
    excess_ns: Floats,
    topology: Topology,
    *,
    seed: int = 0,
    num_draws: int = _NUM_DRAWS,
    level: float = HotspotThresholds.level,
    min_steps: int = HotspotThresholds.min_steps,
    floor_ns: float = 0.0,
    most: int = _MAX_HOTSPOTS,
) -> tuple[Hotspot, ...]:
    """Return the units that are slower than the others of their level, the largest effect first; empty for none.

    Model: the mean excess of rank r is mu + leaf + node + rank + noise. The level of a unit is the lower median of the
    units below it. Its effect is what it exceeds its parent by, compared with the median of all other units of its
    level. (Means, as in a linear mixed model, spread the fault of one rank over its node, which was then named as well
    in 60 of 60 simulated runs of 8 x 4 ranks.) Effects are random with one variance per level, by the method of moments
    (Searle, Casella, McCulloch, Variance Components, 1992, ch. 3), and are shrunk by variance / (variance + error^2),
    at most by one standard error (limited translation, Efron and Morris 1972, JASA 67:130). A level of fewer than
    `MIN_UNITS` units has no variance: its effects are fixed. Steps are resampled in moving blocks (Kuensch 1989),
    all ranks together.

    Args:
        excess_ns: excess over the role, float64, (num_ranks, num_steps), in the order of `topology.ranks`.
        topology: where the ranks are.
        seed: of the bootstrap.
        num_draws: of the bootstrap.
        level: largest p-value of what is returned.
        min_steps: nothing is returned with fewer.
        floor_ns: smallest effect of what is returned.
        most: largest number of hotspots.
    """
    num_ranks, num_steps = excess_ns.shape
    if num_ranks < 2 or num_steps < min_steps:
        return ()
    levels, order = _levels(topology)
    rows_ns = np.asarray(excess_ns, np.float64)[order]
    tiny_ns = ROUNDING * float(np.abs(rows_ns).max()) + TINY
    effects = _nested_effects(_resampled_means(rows_ns, np.random.default_rng(seed), num_draws), levels, tiny_ns)
    is_shown = [_has_several(one, below) for one, below in zip(levels, [None, *levels[:-1]], strict=True)]
    num_compared = sum(int(shown.sum()) for shown in is_shown)
    found: list[tuple[Hotspot, Bools]] = []
    for one, of_level, shown in zip(levels, effects, is_shown, strict=True):
        p_value = num_compared * stdtr(_NUM_BLOCKS - 1, -of_level.contrast_ns[0] / of_level.error_ns)
        is_hot = shown & (p_value <= level) & (of_level.shrunk_ns > max(floor_ns, tiny_ns))
        low, high = of_level.interval_ns
        for unit in np.flatnonzero(is_hot):
            aliases = topology.aliases(one.kind, int(one.index[unit]))
            hotspot = Hotspot(
                kind=aliases[0][0],
                id=aliases[0][1],
                effect_ns=float(of_level.shrunk_ns[unit]),
                interval_ns=(float(low[unit]), float(high[unit])),
                loss_share=0.0,
                p_value=min(float(p_value[unit]), 1.0),
                aliases=tuple(unit_name(alias) for alias in aliases),
            )
            found.append((hotspot, one.of_row == unit))
    found = sorted(found, key=lambda pair: -pair[0].effect_ns)[:most]
    shares = [_loss_share(rows_ns, rows, hotspot.effect_ns) for hotspot, rows in found]
    priced = [replace(hotspot, loss_share=share) for (hotspot, _), share in zip(found, shares, strict=True)]
    return tuple(sorted(priced, key=lambda hotspot: (-hotspot.loss_share, -hotspot.effect_ns)))


def _levels(topology: Topology) -> tuple[list[_Level], Ints]:
    """Return the levels that differ from each other, ranks first, and the order of the rows of `topology` in them."""
    order = np.lexsort((np.arange(topology.num_ranks), topology.node, topology.leaf))
    units: list[tuple[UnitKind, Ints]] = [("rank", np.arange(topology.num_ranks))]
    if 1 < topology.num_nodes < topology.num_ranks:
        units.append(("node", topology.node))
    if 1 < topology.num_leaves < topology.num_nodes:
        units.append(("leaf", topology.leaf))
    of_row = [np.concatenate([[0], np.cumsum(np.diff(unit[order]) != 0)]) for _, unit in units]
    of_row.append(np.zeros_like(order))
    levels = []
    for (kind, unit), own, above in zip(units, of_row[:-1], of_row[1:], strict=True):
        _, first = np.unique(own, return_index=True)
        levels.append(_Level(kind=kind, index=unit[order][first], parent=above[first], of_row=own))
    return levels, order


def _has_several(one: _Level, below: _Level | None) -> Bools:
    """Return which units have more than one child, and so are not the same as it, (num_units,)."""
    if below is None:
        return np.ones(len(one.index), np.bool_)
    return np.asarray(np.bincount(below.parent, minlength=len(one.index)) > 1)


def _resampled_means(rows_ns: Floats, random: np.random.Generator, num_draws: int) -> Floats:
    """Return the mean of each rank, then means over moving blocks of steps, (1 + num_draws, num_ranks)."""
    num_steps = rows_ns.shape[1]
    length = max(1, num_steps // _NUM_BLOCKS)
    sums = np.cumsum(np.pad(rows_ns, ((0, 0), (1, 0))), axis=1)
    blocks = (sums[:, length:] - sums[:, :-length]) / length
    num_blocks, num_starts = -(-num_steps // length), blocks.shape[1]
    starts = random.integers(0, num_starts, (num_draws, num_blocks))
    cells = (starts + num_starts * np.arange(num_draws)[:, None]).ravel()
    weights = np.bincount(cells, minlength=num_draws * num_starts).reshape(num_draws, num_starts) / num_blocks
    # Block means of a finite series vary less around its own mean than around the true one.
    widening = np.sqrt(num_steps / (num_steps - length)) * _block_widening(rows_ns, length)
    draws = weights @ (blocks - blocks.mean(axis=1, keepdims=True)).T * widening
    mean = rows_ns.mean(axis=1)
    return np.vstack([mean, mean + draws])


def _block_widening(rows_ns: Floats, length: int) -> float:
    """Return the factor by which short blocks understate the noise of a mean if neighbouring steps are correlated.

    It compares the variance of means of short AR(1) blocks with that of long ones. The autocorrelation is that of all
    ranks together, of what remains without the common course of a step, with Kendall's bias correction (1954,
    Biometrika 41:403).
    """
    own_ns = rows_ns - np.median(rows_ns, axis=0) if len(rows_ns) > 2 else rows_ns
    own_ns = own_ns - own_ns.mean(axis=1, keepdims=True)
    total = float((own_ns**2).sum())
    if total <= 0:
        return 1.0
    raw = float((own_ns[:, 1:] * own_ns[:, :-1]).sum()) / total
    rho = min(max(raw + (1 + _KENDALL * raw) / rows_ns.shape[1], 0.0), MAX_SHORT_RHO)
    long = (1 + rho) / (1 - rho)
    return float(np.sqrt(long / (long - 2 * rho * (1 - rho**length) / (length * (1 - rho) ** 2))))


def _nested_effects(means_ns: Floats, levels: list[_Level], tiny_ns: float) -> list[_Effects]:
    """Return the effects of each level; a unit without siblings is compared with its parent's reference.

    Args:
        means_ns: mean of each rank, from the data in row 0, (1 + num_draws, num_ranks).
        levels: ranks first.
        tiny_ns: the size that rounding may give to no effect.
    """
    means = [means_ns]
    for one in levels[:-1]:
        means.append(_lower_medians(means[-1], np.flatnonzero(np.diff(one.parent, prepend=-1))))
    own_base = above = np.zeros((len(means_ns), 1))
    effects = []
    for one, mean in reversed(list(zip(levels, means, strict=True))):
        own_base = np.where(one.is_only_child, own_base[:, one.parent], above[:, one.parent])
        excess = mean - own_base
        contrast = excess - others_median(excess.T).T
        error = np.maximum(contrast[1:].std(axis=0, ddof=1), tiny_ns)
        shrunk = _shrunk(contrast[0], error)
        effects.append(_Effects(contrast_ns=contrast, error_ns=error, shrunk_ns=shrunk))
        kept = np.divide(shrunk, contrast[0], out=np.zeros_like(shrunk), where=contrast[0] != 0)
        above = mean - contrast * (1 - kept)
    return effects[::-1]


def _shrunk(estimate: Floats, error: Floats) -> Floats:
    """Return random effects, shrunk towards 0 by what noise adds to their spread, at most by one standard error."""
    if len(estimate) < MIN_UNITS:
        return estimate
    variance = max(float(estimate.var(ddof=1) - (error**2).mean()), 0.0)
    limit = np.maximum(variance / (variance + error**2) * np.abs(estimate), np.abs(estimate) - error)
    return np.asarray(np.sign(estimate) * limit)


def _lower_medians(means: Floats, begins: Ints) -> Floats:
    """Return the lower median of each unit's children, (1 + num_draws, num_units): the smaller one of two."""
    parts = np.split(means, begins[1:], axis=1)
    return np.stack([np.sort(part, axis=1)[:, (part.shape[1] - 1) // 2] for part in parts], axis=1)


def _loss_share(rows_ns: Floats, rows: Bools, effect_ns: float) -> float:
    """Return by which share the mean excess of the latest rank falls without an effect on some rows."""
    others = rows_ns[~rows].max(axis=0, initial=0.0)
    loss = np.maximum(rows_ns[rows].max(axis=0), others).mean()
    without = np.maximum(rows_ns[rows].max(axis=0) - effect_ns, others).mean()
    return float((loss - without) / loss) if loss > 0 else 0.0
