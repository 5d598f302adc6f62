"""Events: single steps that take much longer, and come back at equal distances or on the same node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import EventEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Panels
from hpcpace.metrics.recurrence import LEAST_EVENTS, Period, find_period, run_begins, steps_between
from hpcpace.metrics.roles import Stage, StageComparison, compare_events

_REGULAR = 0.05
_SURE = 1e-3
_EVEN = 0.1
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Events that come back.

    Attributes:
        period_ns: their distance; None where they share a node and no distance.
        p_value: of as much by chance.
        nodes: the nodes that they strike, as indices among the sorted nodes; empty where those are many.
        is_event: bool, (num_nodes, num_steps).
    """

    period_ns: float | None
    p_value: float
    nodes: tuple[int, ...]
    is_event: Booleans


def event_finding(
    panels: Panels, work_ns: Floats, settings: DiagnosisConfig, *, is_collection_found: bool = False
) -> list[DiagnosisFinding]:
    """Return events that come back, with what they add to the slowest own work in their steps as loss.

    Events that are garbage collection are not found a second time if that `is_collection_found` already. Steps that
    alternate are no events: the report warns that they may be parts of steps.
    """
    found = recurrence(panels, work_ns)
    if found is None or found.p_value >= 2 * settings.level or _is_alternation(panels, found):
        return []
    is_event: Booleans = np.any(found.is_event, axis=0)
    slowest = work_ns.max(axis=0) if not panels.is_role_known else _above_role(panels, work_ns)
    usual = float(np.median(slowest[~is_event])) if not is_event.all() else 0.0
    share = float(np.where(is_event, np.maximum(slowest - usual, 0.0), 0.0).mean()) / panels.mean_time_ns
    if share < settings.runtime_share:
        return []
    stage = _stages(panels, work_ns, found, is_event)
    if is_collection_found and stage is not None and stage.stages[:1] == (Stage.COLLECTION,):
        return []
    return [
        DiagnosisFinding(
            evidence=EventEvidence(
                events=int(is_event.sum()),
                share=share,
                period_ns=found.period_ns,
                period_steps=steps_between(run_begins(is_event)) if found.period_ns is not None else None,
                stages=(stage,),
            ),
            loss_share=share,
            confidence=confidence_of(found.p_value),
            culprits=tuple(_node_culprit(panels, work_ns, found.is_event, unit) for unit in found.nodes),
        )
    ]


def _is_alternation(panels: Panels, found: Recurrence) -> bool:
    """Return whether events come as often as steps alternate, or after a multiple of that many steps."""
    if panels.alternation is None or found.period_ns is None:
        return False
    num_cycles = found.period_ns / panels.mean_time_ns / panels.alternation.period
    return abs(num_cycles - round(num_cycles)) < _EVEN or num_cycles < 1


def _stages(panels: Panels, work_ns: Floats, found: Recurrence, is_event: Booleans) -> StageComparison | None:
    """Return in which stage the steps of events are longer, of the ranks that they strike; None without phases."""
    if panels.parts_ns is None:
        return None
    units = np.unique(panels.node)
    struck = np.flatnonzero(np.isin(panels.node, units[list(found.nodes)] if found.nodes else units))
    return panels.qualified(compare_events(panels.parts_ns, work_ns, struck, is_event))


def _above_role(panels: Panels, work_ns: Floats) -> Floats:
    """Return by how much the slowest rank exceeds the median of its role, plus what all share, (num_steps,)."""
    rows = [work_ns[panels.role == value] for value in np.unique(panels.role)]
    above = np.array([of.max(axis=0) - np.median(of) for of in rows])
    largest: Floats = above.max(axis=0)
    return largest


def recurrence(panels: Panels, work_ns: Floats) -> Recurrence | None:
    """Return the events that come back most surely; None without any.

    A node has an event where the mean own work of its ranks, beyond what all ranks share in that step, exceeds its
    median by five robust standard deviations and by 3 percent; what all share is judged alike, as events of all. Three
    questions: have the events of all nodes one distance, each node with a phase of its own? Have those that all share
    one? And do events strike one node more often than one in so many (binomial), at equal distances or not (both by
    Fisher's method), all events or the large ones?
    """
    shared = _shared(work_ns)
    units = np.unique(panels.node)
    own = np.array([work_ns[panels.node == unit].mean(axis=0) - shared for unit in units])
    usual = max(float(np.median(shared)), 1.0)
    of_node, of_all = _events(own, usual), _events(shared[None, :], usual)
    found = [
        *_together(panels, of_node),
        *_together(panels, np.repeat(of_all, len(units), axis=0)),
        *_on_one(panels, of_node),
        *(replace(each, p_value=2 * each.p_value) for each in _on_one(panels, _large(own, of_node))),
    ]
    # Who is struck says more than that somebody is.
    return min(found, key=lambda each: (each.p_value > _SURE or not each.nodes, each.p_value), default=None)


def _shared(work_ns: Floats) -> Floats:
    """Return what all ranks share in each step, their lower median: of two nodes, one may be late."""
    middle = (len(work_ns) - 1) // 2
    lower: Floats = np.partition(work_ns, middle, axis=0)[middle]
    return lower


def _together(panels: Panels, is_event: Booleans) -> list[Recurrence]:
    begins = _begins(is_event)
    # Equal rows count once; as bytes they compare many times faster than np.unique does with thousands of columns.
    rows = sorted({row.tobytes() for row in begins[begins.any(axis=1)]})
    period = _period(panels, [np.frombuffer(row, np.bool_) for row in rows])
    if period is None:
        return []
    num_expected = float(panels.since_ns[-1] - panels.since_ns[0]) / period.length
    hit = np.flatnonzero(begins.sum(axis=1) >= 0.6 * num_expected)
    nodes = tuple(hit.tolist()) if 0 < 4 * len(hit) <= len(is_event) else ()
    return [Recurrence(period_ns=period.length, p_value=period.p_value, nodes=nodes, is_event=is_event)]


def _on_one(panels: Panels, is_event: Booleans) -> list[Recurrence]:
    begins = _begins(is_event)
    num_events = begins.sum(axis=1)
    unit, total = int(num_events.argmax()), int(num_events.sum())
    # Where all nodes are struck by chance, one has the most events: less than twice as many are no reason to name it.
    if len(begins) < 2 or num_events[unit] < max(LEAST_EVENTS, 2 * np.sort(num_events)[-2]):
        return []
    same = min(1.0, len(begins) * float(bdtrc(int(num_events[unit]) - 1, total, 1 / len(begins))))
    period = _period(panels, [begins[unit]])
    regular = period.p_value if period is not None else 1.0
    product = max(same * regular, 1e-300)
    own = np.zeros_like(is_event)
    own[unit] = is_event[unit]
    return [
        Recurrence(
            period_ns=period.length if period is not None and regular < _REGULAR else None,
            p_value=product * (1 - float(np.log(product))),
            nodes=(unit,),
            is_event=own,
        )
    ]


def _begins(is_event: Booleans) -> Booleans:
    """Return the first steps of runs of late steps: a run is one event."""
    before = np.concatenate([np.zeros((len(is_event), 1), np.bool_), is_event[:, :-1]], axis=1)
    begins: Booleans = is_event & ~before
    return begins


def _period(panels: Panels, rows: list[Booleans]) -> Period | None:
    since_ns = panels.since_ns - panels.since_ns[0]
    return find_period([since_ns[row] for row in rows], span=float(since_ns[-1]), least=2 * panels.mean_time_ns)


def _events(rows_ns: Floats, usual_ns: float) -> Booleans:
    above = rows_ns - np.median(rows_ns, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(above), axis=1, keepdims=True)
    is_event: Booleans = above > np.maximum(5 * spread, 0.03 * usual_ns)
    return is_event


def _large(rows_ns: Floats, is_event: Booleans) -> Booleans:
    """Return the events of more than half of the third largest: small ones everywhere hide large ones of one node."""
    above = rows_ns - np.median(rows_ns, axis=1, keepdims=True)
    sizes_ns = np.sort(above[is_event])
    if len(sizes_ns) < LEAST_EVENTS:
        return is_event
    large: Booleans = is_event & (above > sizes_ns[-LEAST_EVENTS] / 2)
    return large


def _node_culprit(panels: Panels, work_ns: Floats, is_event: Booleans, unit: int) -> Culprit:
    rows = np.flatnonzero(panels.node == np.unique(panels.node)[unit])
    work = work_ns[rows].mean(axis=0) - _shared(work_ns)
    excess = (work[is_event[unit]] - np.median(work)) / max(float(np.median(work_ns)), 1.0)
    effect, host = float(excess.mean()), panels.host[rows[0]]
    half = 1.96 * float(excess.std()) / float(np.sqrt(len(excess)))
    aliases = (f"node {host}", *((f"rank {panels.rank[rows[0]]}",) if len(rows) == 1 else ()))
    return Culprit(kind="node", id=host, aliases=aliases, effect=effect, interval=(effect - half, effect + half))
