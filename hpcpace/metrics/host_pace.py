"""Where a device waited for its host: the stream between its marks, and how much of that it was idle.

The host issues work and marks the stream; the lead of a mark is its time on the device less its time on the host. Near
zero, the device had done all that it had and waited. How long it worked before that is not in the marks: it is known
from stretches of the same phase in which the device set the pace, on any rank of the role, and otherwise only bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.phases import innermost
from hpcpace.trace.schema import Phase

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAD_NS = 50_000
"""Lead below which the device had run dry."""
_LEAD_SHARE = 0.01  # of a stretch: a device that ends it so soon after its host had followed it
NO_PHASE = len(Phase)
_PACED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER, NO_PHASE)
_LEAST_SAMPLES = 5
_FARTHEST = 0.95


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """The stream of a rank between consecutive marks inside steps, each (num_stretches,).

    Attributes:
        step: its number.
        phase: innermost phase of the host there, `hpcpace.trace.schema.Phase`, NO_PHASE without one.
        begin_ns, end_ns: on the device.
        is_dry_before, is_dry_after: whether the device had run dry at its begin and its end.
        collected_ns: how long the host collected garbage meanwhile.
    """

    step: Int64s
    phase: Int64s
    begin_ns: Int64s
    end_ns: Int64s
    is_dry_before: NDArray[np.bool_]
    is_dry_after: NDArray[np.bool_]
    collected_ns: Int64s

    @property
    def length_ns(self) -> Int64s:
        """How long they last on the device."""
        return self.end_ns - self.begin_ns


def stretches_between_marks(
    steps: Sequence[Int64s],
    phases: Sequence[Int64s],
    collections: tuple[Int64s, Int64s],
) -> Stretches:
    """Return the stream between the marks of steps and phases.

    Args:
        steps: number, begin and end on the host, begin and end on the device, each (num_steps,).
        phases: phase and the same times, each (num_phases,).
        collections: begin and end of garbage collections on the host, disjoint and ascending.
    """
    host = np.concatenate([*steps[1:3], *phases[1:3]])
    device = np.concatenate([*steps[3:5], *phases[3:5]])
    order = np.lexsort((device, host))
    edges, first = np.unique(host[order], return_index=True)
    passed = np.maximum.accumulate(device[order])
    # Of marks that the host made at one time, as around a wait of the stream alone, the first ends what came before.
    arrived, left = passed[first], passed[np.append(first[1:], len(order)) - 1]
    inside = innermost(phases[1], phases[2], edges)
    phase = np.append(phases[0].astype(np.int64), NO_PHASE)[inside]
    row = np.searchsorted(steps[1], edges[:-1], side="right") - 1
    is_used = (row >= 0) & (edges[:-1] < steps[2][row])
    least = np.maximum(LEAD_NS, _LEAD_SHARE * (arrived[1:] - left[:-1]))
    collected = np.diff(_covered_until(*collections, edges))
    return Stretches(
        step=steps[0].astype(np.int64)[row[is_used]],
        phase=phase[is_used],
        begin_ns=left[:-1][is_used],
        end_ns=arrived[1:][is_used],
        is_dry_before=((left - edges)[:-1] < least)[is_used],
        is_dry_after=((arrived - edges)[1:] < least)[is_used],
        collected_ns=collected[is_used],
    )


def _covered_until(begin_ns: Int64s, end_ns: Int64s, times_ns: Int64s) -> Int64s:
    """Return how much of disjoint ascending intervals lies before some times, (num_times,)."""
    total = np.append(0, np.cumsum(end_ns - begin_ns))
    begun = np.searchsorted(begin_ns, times_ns, side="right")
    last = np.append(end_ns, 0)[begun - 1]
    covered: Int64s = total[begun] - np.where(begun > 0, np.maximum(last - times_ns, 0), 0)
    return covered


@dataclass(frozen=True, kw_only=True)
class UsualLength:
    """How long stretches of a phase last where the device sets the pace: median, and what 5 % of them exceed."""

    median_ns: float
    most_ns: float


def usual_lengths(of_role: Iterable[Stretches]) -> dict[int, UsualLength]:
    """Return the usual length by phase, of the phases of which enough stretches are known; `of_role` is by rank."""
    found = list(of_role)
    phase = np.concatenate([each.phase for each in found])
    length = np.concatenate([each.length_ns for each in found])
    is_own = np.concatenate([~each.is_dry_after & (each.collected_ns == 0) for each in found])
    usual = {}
    for number in _PACED:
        lengths = length[is_own & (phase == number)]
        if len(lengths) >= _LEAST_SAMPLES:
            median, most = np.quantile(lengths, (0.5, _FARTHEST))
            usual[int(number)] = UsualLength(median_ns=float(median), most_ns=float(most))
    return usual


def idle_ns(stretches: Stretches, usual: Mapping[int, UsualLength]) -> tuple[Int64s, Int64s]:
    """Return how long the device was idle in each stretch: for its host, and for a garbage collection of the host.

    A stretch that begins and ends dry was paced by its host: idle is what exceeds the usual length, or at most all of
    it where that is not known. Of others, which may hide a wait or end with a synchronisation, only what exceeds nearly
    all usual lengths counts, if the device then had run dry or the host collected garbage. Time outside of phases
    counts only on ranks that have forward and backward: elsewhere it may be these.

    Args:
        stretches: of a rank.
        usual: by phase, from `usual_lengths`.

    Returns:
        Both int64, (num_stretches,).
    """
    median, most = np.full((2, NO_PHASE + 1), np.nan)
    for phase, each in usual.items():
        median[phase], most[phase] = each.median_ns, each.most_ns
    length = stretches.length_ns.astype(np.float64)
    beyond = np.maximum(length - np.nan_to_num(median[stretches.phase]), 0.0)
    is_far = length > most[stretches.phase]
    is_paced = np.isin(stretches.phase, _PACED)
    if not np.isin((Phase.FORWARD, Phase.BACKWARD), stretches.phase).all():
        is_paced &= ~np.isin(stretches.phase, (Phase.OTHER, NO_PHASE))
    is_dry = stretches.is_dry_after & (stretches.is_dry_before | is_far)
    collected = np.where(is_paced & (is_dry | is_far), np.minimum(beyond, stretches.collected_ns), 0.0)
    waited = np.where(is_paced & is_dry, beyond - collected, 0.0)
    return waited.astype(np.int64), collected.astype(np.int64)
