"""Where waiting began, what the steps hang on, and what they would take with one thing as usual."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.close_up import CloseUp
from hpcpace.diagnosis.diagnose import Panels
from hpcpace.diagnosis.measure import Measured, node_by_rank, own_excess_ns
from hpcpace.diagnosis.modes.pipeline import stage_excess
from hpcpace.diagnosis.passes import passes_of
from hpcpace.diagnosis.summary import Causes, GainRow, OriginRow, PathRow, PipelineBubble
from hpcpace.metrics.causes.bubble import microbatches, pipeline_bubble
from hpcpace.metrics.causes.even_work import even_gain
from hpcpace.metrics.causes.replay import StepGraph
from hpcpace.metrics.causes.what_if import Change, stage_change, what_if
from hpcpace.metrics.lateness.own_delay import agreement
from hpcpace.metrics.operations.communication import op_name
from hpcpace.metrics.phases import EXPOSED_WAIT, OWN_WORK, Part, share_of
from hpcpace.metrics.roles import others_median
from hpcpace.parallel import run_both

_MOST_ROWS = 3
_MOST_PATH = 6
_NEEDLESS = (Part.DATA, Part.GC)
_EVEN = "all work, if it were even"


def cause_figures(measured: Measured, panels: Panels) -> Causes | None:
    """Return where waiting began and what would change it; None without operations, or where waits are not known."""
    close_up = measured.close_up
    if close_up is None:
        return None
    if measured.host_timed or not measured.are_waits_known:
        return Causes(
            gains=(),
            rebuild_error=None,
            origins=(),
            traced_share=None,
            path=(),
            suspected_ranks=_suspected(measured, close_up, panels),
            bubble=None,
        )
    # Both take long, and neither needs the other.
    (gains, error), suspected = run_both(
        lambda: _gains(measured, panels, close_up), lambda: _suspected(measured, close_up, panels)
    )
    exposed_share = share_of(measured.parts, EXPOSED_WAIT)
    return Causes(
        gains=gains,
        rebuild_error=error,
        origins=_origins(measured),
        traced_share=min(_traced_ns(measured) / max(float(measured.parts.sum()), 1.0), exposed_share),
        path=_path(measured),
        suspected_ranks=suspected,
        bubble=_bubble(measured, close_up, panels),
    )


def _gains(measured: Measured, panels: Panels, close_up: CloseUp) -> tuple[tuple[GainRow, ...], float | None]:
    rebuilt = measured.rebuilt
    if rebuilt is None:
        return (), None
    changes = [
        *_slow_places(panels),
        *_stages(panels),
        *_phases(measured, rebuilt.graph),
        *_operations(close_up),
    ]
    names = {(change.kind, change.id): _name(change, panels, measured, close_up) for change in changes}
    if not changes:
        return (), None
    found = what_if(rebuilt, changes)
    even = even_gain(rebuilt, passes_of(close_up))
    rows = [
        GainRow(
            name=names.get((gain.change.kind, gain.change.id), _EVEN),
            gain_share=gain.gain_share,
            interval=gain.interval,
        )
        for gain in (*found.gains, *([even] if even is not None else []))
    ]
    return tuple(sorted(rows, key=lambda row: -row.gain_share)), found.error_share


def _slow_places(panels: Panels) -> list[Change]:
    """Return the changes that put the slowest ranks and nodes back to usual."""
    excess_ns = own_excess_ns(panels)
    if excess_ns is None:
        return []
    of_rank = excess_ns.mean(axis=1)
    changes = [
        Change(kind="rank", id=int(panels.rank[row]), ranks=(int(row),)) for row in of_rank.argsort()[::-1][:_MOST_ROWS]
    ]
    nodes = np.unique(panels.node)
    if 1 < len(nodes) < len(panels.rank):
        of_node = np.array([of_rank[panels.node == node].mean() for node in nodes])
        for at in of_node.argsort()[::-1][:_MOST_ROWS]:
            rows = np.flatnonzero(panels.node == nodes[at])
            changes.append(Change(kind="node", id=int(nodes[at]), ranks=tuple(rows.tolist())))
    return changes


def _stages(panels: Panels) -> list[Change]:
    """Return the changes that bring stages with more work than the others to the work of those."""
    stages = np.unique(panels.stage[panels.stage >= 0]).tolist()
    shares = {stage: stage_excess(panels.work_ns, panels.stage, stage)[0] for stage in stages if len(stages) > 1}
    return [
        stage_change(stage, np.flatnonzero(panels.stage == stage), panels.work_ns, share)
        for stage, share in shares.items()
        if share > 0
    ]


def _phases(measured: Measured, graph: StepGraph) -> list[Change]:
    """Return the changes that make phases usual: no wait for data, no garbage collection, the others as in the role."""
    columns = np.searchsorted(measured.chosen.step, graph.step)
    changes = []
    for part in OWN_WORK:
        spent_ns = measured.parts[:, columns, part]
        removed_ns = spent_ns if part in _NEEDLESS else np.maximum(_beyond_role(spent_ns, measured.role), 0.0)
        if removed_ns.any():
            is_at_begin = part == Part.DATA
            changes.append(Change(kind="phase", id=int(part), removed_ns=removed_ns, is_at_begin=is_at_begin))
    return changes


def _beyond_role(spent_ns: NDArray[np.float64], role: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return by how much each rank exceeds the median of the others of its role in each step, 0 where it is alone."""
    beyond_ns = np.zeros(spent_ns.shape)
    for value in np.unique(role):
        rows = np.flatnonzero(role == value)
        if len(rows) > 1:
            beyond_ns[rows] = spent_ns[rows] - others_median(spent_ns[rows])
    return beyond_ns


def _operations(close_up: CloseUp) -> list[Change]:
    """Return the changes that make the transfers of one kind of operation usual."""
    done, work = close_up.evidence.operations, close_up.work
    changes = []
    for op in np.unique(done.op[work.is_known]).tolist():
        positions = np.unique(work.position[work.is_known & (done.op == op)])
        changes.append(Change(kind="transfers", id=int(op), positions=tuple(positions.tolist()), is_transfer=True))
    return changes


def _name(change: Change, panels: Panels, measured: Measured, close_up: CloseUp) -> str:
    if change.kind == "rank":
        return f"work of rank {change.id}"
    if change.kind == "node":
        return f"work of node {panels.host[int(np.flatnonzero(panels.node == change.id)[0])]}"
    if change.kind == "stage":
        return f"work of stage {change.id}"
    if change.kind == "phase":
        return f"phase {Part(change.id).name.lower()}"
    return f"transfers of {op_name(change.id)}"


def _traced_ns(measured: Measured) -> float:
    return float(measured.operations.origins.waited_ns.sum())


def _origins(measured: Measured) -> tuple[OriginRow, ...]:
    found, ranks = measured.operations.origins, measured.timed.ranks
    # The whole that shares are of is all exposed wait, also what cannot be traced to a rank.
    waited_ns = max(float(measured.parts[:, :, list(EXPOSED_WAIT)].sum()), _traced_ns(measured), 1.0)
    rows = found.caused_ns.argsort()[::-1][: 2 * _MOST_ROWS]
    scale = max(float(measured.parts.sum()), 1.0)
    return tuple(
        OriginRow(
            rank=int(ranks[row]),
            share_of_waits=float(found.caused_ns[row]) / waited_ns,
            propagated_share=float(found.propagated_ns[row]) / max(float(found.caused_ns[row]), 1.0),
            step_share=float(found.caused_ns[row]) / scale,
        )
        for row in rows.tolist()
        if found.caused_ns[row] > 0
    )


def _path(measured: Measured) -> tuple[PathRow, ...]:
    path = measured.operations.path
    total_ns = max(path.length_ns, 1)
    rows = [
        PathRow(name=f"work of rank {rank}", share=int(work_ns) / total_ns)
        for rank, work_ns in zip(measured.timed.ranks, path.work_ns, strict=True)
    ]
    rows += [
        PathRow(name=f"transfer of {op_name(kind)}", share=length_ns / total_ns)
        for kind, length_ns in sorted(path.transfer_ns.items())
    ]
    return tuple(sorted(rows, key=lambda row: -row.share)[:_MOST_PATH])


def _suspected(measured: Measured, close_up: CloseUp, panels: Panels) -> tuple[int, ...]:
    """Return the ranks whose arrival on the common clock contradicts how long their operations last."""
    evidence = close_up.evidence
    found = agreement(
        evidence.operations,
        evidence.matching,
        close_up.work,
        ranks=evidence.ranks,
        halfwidth_ns=measured.halfwidth_ns,
        node=node_by_rank(evidence.ranks, panels.node),
    )
    return tuple(found.rank[found.is_suspected].tolist())


def _bubble(measured: Measured, close_up: CloseUp, panels: Panels) -> PipelineBubble | None:
    if len(np.unique(panels.stage)) < 2 or not panels.is_role_known:
        return None
    waited_ns = measured.operations.panels.message_wait_ns
    num_microbatches = microbatches(close_up.evidence.operations, close_up.work)
    found = pipeline_bubble(waited_ns, panels.times_ns, panels.stage, num_microbatches=num_microbatches)
    if found is None:
        return None
    return PipelineBubble(share=found.share, ideal_share=found.ideal_share, by_stage=tuple(found.by_stage.tolist()))
