"""The cost of waiting: jitter, origins of waits, the critical path, gains of changes."""

from __future__ import annotations

import numpy as np

from hpcpace.core.pool import run_both
from hpcpace.diagnosis.close_up import CloseUp
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.measure import Measured, beyond_role_ns, node_by_rank, own_excess_ns
from hpcpace.diagnosis.summary import (
    Causes,
    GainRow,
    Growth,
    Jitter,
    OriginRow,
    PathRow,
    PipelineBubble,
    Prediction,
    Predictions,
    SensitivityRow,
)
from hpcpace.diagnosis.topics.pipeline import PipelineThresholds, stage_excess
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.amplification import (
    NoiseThresholds,
    WorkParts,
    amplification,
    bound_switches,
    collective_sensitivity,
    noise_amplification,
    noise_intensity,
    noise_shares,
    split_work,
)
from hpcpace.metrics.arrivals import ArrivalThresholds, suspected_clocks
from hpcpace.metrics.critical_path import ideal_bubble, microbatches, pipeline_bubble
from hpcpace.metrics.growth import (
    GrowthCurve,
    NullModel,
    PredictionThresholds,
    Refusal,
    TransferTerm,
    extrapolate,
    null_model,
    work_growth,
)
from hpcpace.metrics.kernels import grouped_medians
from hpcpace.metrics.operations import op_name, synchronises
from hpcpace.metrics.pass_work import even_gain, even_stages
from hpcpace.metrics.phases import EXPOSED_WAIT, OWN_WORK, Part, share_of
from hpcpace.metrics.segments import LocalWork, SegmentPanel, segment_panels
from hpcpace.metrics.special import UPPER_95, ndtri
from hpcpace.metrics.what_if import Change, StepGraph, what_if
from hpcpace.trace.schema import Op, Phase

_MAX_ROWS, _MAX_PATH, _MAX_SENSITIVITY_ROWS = 3, 6, 4  # display: rows of each table
_EVEN = "all work, if it were even"
_FACTORS = (1, 2, 4, 8, 16)  # display: multiples of the nodes for which a step is predicted
_OP_BITS = 8  # format: of the number of an operation
_Z = float(ndtri(UPPER_95))  # statistics: half of a 95 % interval in standard errors


def cause_figures(measured: Measured, panels: Panels, limits: PipelineThresholds | None = None) -> Causes | None:
    """Return where waiting began and what would change it; None without operations, or where waits are not known."""
    close_up = measured.close_up
    if close_up is None:
        return None
    if measured.host_timed or not measured.are_waits_known:
        return Causes(suspected_ranks=_suspected(measured, close_up, panels))
    # Both take long, and neither needs the other.
    (gains, error), suspected = run_both(
        lambda: _gains(measured, panels, close_up, limits or PipelineThresholds()),
        lambda: _suspected(measured, close_up, panels),
    )
    exposed_share = share_of(measured.parts, EXPOSED_WAIT)
    traced_ns = float(measured.operations.origins.waited_ns.sum())
    return Causes(
        gains=gains,
        rebuild_error=error,
        origins=_origins(measured, traced_ns),
        traced_share=min(traced_ns / max(float(measured.parts.sum()), 1.0), exposed_share),
        path=_path(measured),
        suspected_ranks=suspected,
        bubble=_bubble(measured, close_up, panels),
    )


_WITHOUT = (Phase.GC, Phase.CHECKPOINT, Phase.EVAL)
"""Phases without which steps are rebuilt: none of them is usual in a step."""


def _gains(
    measured: Measured, panels: Panels, close_up: CloseUp, limits: PipelineThresholds
) -> tuple[tuple[GainRow, ...], float | None]:
    rebuilt = measured.rebuilt
    if rebuilt is None:
        return (), None
    named = [*_slow_places(panels), *_phases(measured, rebuilt.graph), *_operations(close_up)]
    names = {(change.kind, change.id): name for name, change in named}
    work, excess = close_up.pass_work, _stages(panels, limits)
    if not named and not excess:
        return (), None
    found = what_if(rebuilt, [change for _, change in named])
    gains = [(names[gain.change.kind, gain.change.id], gain) for gain in found.gains]
    for stage, share in excess.items():
        even = even_stages(rebuilt, work, panels.work_ns - panels.gc_ns, panels.stage, {stage: share})
        gain = rebuilt.gain_of(*even)
        gains.append((f"work of stage {stage}", gain))
    for phase in _WITHOUT:
        if (stretches := close_up.stretches(phase)) is not None:
            gains.append((f"phase {phase.name.lower()}", stretches.gain(rebuilt)))
    if work is not None:
        gains.append((_EVEN, even_gain(rebuilt, work)))
    rows = [GainRow(name=name, gain_share=gain.share.value, interval=gain.share.interval) for name, gain in gains]
    return tuple(sorted(rows, key=lambda row: -row.gain_share)), found.error_share


def _slow_places(panels: Panels) -> list[tuple[str, Change]]:
    """Return the changes, with their names, that put the slowest ranks and nodes back to usual."""
    excess_ns = own_excess_ns(panels)
    if excess_ns is None:
        return []
    of_rank = excess_ns.mean(axis=1)
    changes = [
        (f"work of rank {panels.rank[row]}", Change(kind="rank", id=int(panels.rank[row]), ranks=(row,)))
        for row in of_rank.argsort()[::-1][:_MAX_ROWS].tolist()
    ]
    nodes = np.unique(panels.node)
    if 1 < len(nodes) < len(panels.rank):
        of_node = np.array([of_rank[panels.node == node].mean() for node in nodes])
        for at in of_node.argsort()[::-1][:_MAX_ROWS]:
            rows = np.flatnonzero(panels.node == nodes[at])
            change = Change(kind="node", id=int(nodes[at]), ranks=tuple(rows.tolist()))
            changes.append((f"work of node {panels.host[rows[0]]}", change))
    return changes


def _stages(panels: Panels, limits: PipelineThresholds) -> dict[int, float]:
    """Return the excess of each stage with more work than the others."""
    stages = np.unique(panels.stage[panels.stage >= 0]).tolist()
    if len(stages) < 2:
        return {}
    found = {of: stage_excess(panels.work_ns - panels.gc_ns, panels.stage, of, limits.alike_level)[0] for of in stages}
    return {of: share for of, share in found.items() if share > 0}


def _phases(measured: Measured, graph: StepGraph) -> list[tuple[str, Change]]:
    """Return the changes, with their names, that make phases usual: no wait for data, the others as in the role."""
    columns = np.searchsorted(measured.chosen.step, graph.step)
    changes = []
    for part in OWN_WORK:
        spent_ns = measured.parts[:, columns, part]
        is_data = part == Part.DATA
        removed_ns = spent_ns if is_data else np.maximum(beyond_role_ns(spent_ns, measured.role), 0.0)
        if removed_ns.any() and part != Part.GC:
            change = Change(kind="phase", id=int(part), removed_ns=removed_ns, is_at_begin=is_data)
            changes.append((f"phase {part.name.lower()}", change))
    return changes


def _operations(close_up: CloseUp) -> list[tuple[str, Change]]:
    """Return the changes, with their names, that make the transfers of one kind of operation usual."""
    done, work = close_up.evidence.operations, close_up.work
    changes = []
    for op in np.unique(done.op[work.is_known]).tolist():
        positions = np.unique(work.position[work.is_known & (done.op == op)])
        change = Change(kind="transfers", id=int(op), positions=tuple(positions.tolist()), is_transfer=True)
        changes.append((f"transfers of {op_name(op)}", change))
    return changes


def _origins(measured: Measured, traced_ns: float) -> tuple[OriginRow, ...]:
    found, ranks = measured.operations.origins, measured.timed.ranks
    # The whole that shares are of is all exposed wait, also what cannot be traced to a rank.
    waited_ns = max(float(measured.spent_ns(EXPOSED_WAIT).sum()), traced_ns, 1.0)
    rows = found.caused_ns.argsort()[::-1][: 2 * _MAX_ROWS]
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
    return tuple(sorted(rows, key=lambda row: -row.share)[:_MAX_PATH])


def _suspected(measured: Measured, close_up: CloseUp, panels: Panels) -> tuple[int, ...]:
    """Return the ranks whose arrival on the common clock contradicts how long their operations last."""
    evidence = close_up.evidence
    is_suspected = suspected_clocks(
        evidence.operations,
        evidence.matching,
        close_up.work,
        ranks=evidence.ranks,
        halfwidth_ns=measured.halfwidth_ns,
        node=node_by_rank(evidence.ranks, panels.node),
        limits=measured.thresholds.of(ArrivalThresholds),
    )
    return tuple(np.asarray(evidence.ranks)[is_suspected].tolist())


def _bubble(measured: Measured, close_up: CloseUp, panels: Panels) -> PipelineBubble | None:
    if len(np.unique(panels.stage)) < 2 or not panels.is_role_known:
        return None
    waited_ns = measured.operations.panels.message_wait_ns
    by_stage = pipeline_bubble(waited_ns, panels.times_ns, panels.stage)
    if by_stage is None:
        return None
    number = microbatches(close_up.evidence.operations, close_up.work)
    ideal_share = ideal_bubble(len(by_stage), number) if number else None
    return PipelineBubble(share=float(by_stage.mean()), ideal_share=ideal_share, by_stage=tuple(by_stage.tolist()))


def jitter_figures(measured: Measured, panels: Panels, transfer: TransferTerm | None = None) -> Jitter | None:
    """Return the figures of jitter; None where no two ranks wait for each other, or own work is not known.

    `transfer` is how transfers grow with nodes, where a probe says so.
    """
    panel = None if panels.host_timed else _largest_loss(measured, panels)
    if panel is None or panel.work_ns.shape[1] < 2:
        return None
    rows = np.searchsorted(panels.rank, panel.members)
    work_ns, node = panel.work_ns, panels.node[rows]
    found = amplification(work_ns)
    if found is None:
        return None
    limits = measured.thresholds.of(NoiseThresholds)
    parts = split_work(work_ns, node, limits=limits)
    null = null_model(work_ns, parts) if parts is not None else None
    shares, transfer_ns = noise_shares(work_ns), panels.transfer_ns.mean(axis=0)
    bound = bound_switches(panels.work_ns.mean(axis=0), transfer_ns, margin=limits.bound_margin)
    columns = np.isin(measured.chosen.step, panel.step)
    is_everywhere = len(np.unique(node)) == len(np.unique(panels.node))
    return Jitter(
        ranks=panel.members,
        num_steps=work_ns.shape[1],
        num_segments=work_ns.shape[2],
        amplification=found.amplification,
        interval=found.interval,
        persistent=found.persistent,
        persistent_null=found.persistent_null,
        transient=found.transient,
        loss_share=found.loss_ns / panels.mean_time_ns,
        null=null.amplification.value if null else None,
        null_interval=null.amplification.interval if null else None,
        comparison=str(null.comparison) if null else "",
        is_node_unit=bool(null and null.is_node_unit),
        common_share=shares.common if shares else None,
        rank_share=shares.rank if shares else None,
        residual_share=shares.residual if shares else None,
        noise_intensity=noise_intensity(work_ns),
        # A pipeline's step is longer than any rank's work by its bubble, which is no noise. Nor are waits that look
        # like transfers.
        noise_amplification=noise_amplification(
            panels.times_ns[columns], work_ns, transfer_ns[columns], limits.min_noise
        )
        if len(np.unique(panels.stage)) == 1 and measured.are_waits_known
        else None,
        compute_bound_share=bound.compute_share if bound else None,
        num_regime_switches=bound.num_switches if bound else 0,
        growth=_growth(work_growth(work_ns, parts) if parts is not None else None, null),
        predictions=_predictions(
            work_ns,
            node,
            parts,
            panels.mean_time_ns,
            transfer if is_everywhere else None,
            measured.thresholds.of(PredictionThresholds),
        ),
    )


def _largest_loss(measured: Measured, panels: Panels) -> SegmentPanel | None:
    """Return the work of the ranks that wait for each other, of the set that loses most."""
    found: list[SegmentPanel] = []
    if (close_up := measured.close_up) is not None:
        evidence, steps, blocks = close_up.evidence, close_up.steps, close_up.blocks
        found += segment_panels(evidence.operations, steps, close_up.work, ranks=evidence.ranks, blocks=blocks)
    if not found and panels.is_role_known:
        found = [_of_role(panels, measured, value) for value in np.unique(panels.role)]

    def loss_ns(panel: SegmentPanel) -> float:
        work_ns = panel.work_ns
        return float((work_ns.max(axis=0) - work_ns.mean(axis=0)).mean(axis=0).sum()) if work_ns.size else 0.0

    return max((panel for panel in found if len(panel.members) > 1), key=loss_ns, default=None)


def _of_role(panels: Panels, measured: Measured, value: int) -> SegmentPanel:
    rows = panels.role == value
    return SegmentPanel(
        members=tuple(panels.rank[rows].tolist()),
        step=measured.chosen.step,
        work_ns=panels.work_ns[rows][:, :, None],
        op=np.array([Op.ALL_REDUCE], np.uint8),
        num_left_out=0,
    )


def _growth(curve: GrowthCurve | None, null: NullModel | None) -> Growth | None:
    if curve is None:
        return None
    # With all units it is what the null model has from many more draws.
    expected = curve.null if null is None else np.append(curve.null[:-1], null.amplification.value)
    low, high = (tuple(end.tolist()) for end in curve.interval or np.zeros((2, 0)))
    return Growth(
        k=tuple(curve.k.tolist()),
        amplification=tuple(curve.amplification.tolist()),
        low=low,
        high=high,
        null=tuple(expected.tolist()),
        exponent=curve.exponent,
        exponent_interval=curve.exponent_interval,
    )


def _predictions(
    work_ns: Floats,
    node: Ints,
    parts: WorkParts | None,
    mean_time_ns: float,
    transfer: TransferTerm | None,
    limits: PredictionThresholds,
) -> Predictions:
    num_nodes = len(np.unique(node)) * np.array(_FACTORS, np.int64)
    found = extrapolate(work_ns, node, num_nodes, parts=parts, transfer=transfer, limits=limits)
    if isinstance(found, Refusal):
        return Predictions(refused=found.reason, label="", points=())
    points = tuple(
        Prediction(
            num_nodes=int(count),
            loss_share=float(loss) / mean_time_ns,
            interval=(float(low) / mean_time_ns, float(high) / mean_time_ns),
            is_speculative=bool(speculative),
        )
        for count, loss, low, high, speculative in zip(
            num_nodes, found.loss_ns, found.low_ns, found.high_ns, found.is_speculative, strict=True
        )
    )
    return Predictions(refused="", label=found.label, points=points)


def sensitivity_figures(measured: Measured) -> tuple[SensitivityRow, ...]:
    """Return how transfers depend on skew, for the kinds and sizes of collectives that take most time.

    Skew is the largest less the smallest of what its ranks worked before an operation beyond the usual of their role
    there, which needs no common clock; transfer is the largest of its ranks, which does. Interval: slope and 1.96
    standard errors on either side.

    Returns:
        None of them where there are no operations, own work is not known, or too few collectives have a skew beyond the
        clocks' error.
    """
    close_up = measured.close_up
    if close_up is None or measured.host_timed:
        return ()
    evidence, limits = close_up.evidence, measured.thresholds.of(NoiseThresholds)
    done, matching = evidence.operations, evidence.matching
    mask = synchronises(done.op) & matching.is_matched & close_up.work.is_known & (done.group_size > 1)
    rows = matching.order[mask[matching.order]]
    if not len(rows):
        return ()
    starts = np.flatnonzero(np.diff(matching.instance[rows], prepend=-1))
    delay_ns, first = _beyond_usual(close_up.work, rows), rows[starts]
    skew_ns = np.maximum.reduceat(delay_ns, starts) - np.minimum.reduceat(delay_ns, starts)
    transfer_ns = np.maximum.reduceat(evidence.waits.transfer_ns[rows], starts).astype(np.float64)
    error_ns = _clock_error_ns(measured)
    _, size = np.unique(done.size_bytes[first], return_inverse=True)
    key = (size * (int(done.group_size[first].max()) + 1) + done.group_size[first]) << _OP_BITS | done.op[first]
    place = done.group[first] * close_up.work.num_positions + close_up.work.position[first]
    _, example, kind = np.unique(key, return_index=True, return_inverse=True)
    total_ns = np.bincount(kind, weights=transfer_ns)
    found = []
    for number in total_ns.argsort()[::-1].tolist():
        of_kind = np.flatnonzero(kind == number)
        of_kind = of_kind[np.argsort(done.enter_ns[first[of_kind]], kind="stable")]
        slope = collective_sensitivity(transfer_ns[of_kind], skew_ns[of_kind], error_ns, place[of_kind], limits)
        if slope is None:
            continue
        row = first[example[number]]
        half_width = _Z * slope.standard_error
        found.append(
            SensitivityRow(
                op=op_name(int(done.op[row])),
                group_size=int(done.group_size[row]),
                size_bytes=int(done.size_bytes[row]),
                slope=slope.slope,
                interval=(slope.slope - half_width, slope.slope + half_width),
                num_operations=slope.num_operations,
            )
        )
        if len(found) == _MAX_SENSITIVITY_ROWS:
            break
    return tuple(found)


def _beyond_usual(work: LocalWork, rows: Ints) -> Floats:
    """Return own work before operations less the median of their role and position, over ranks and steps.

    One reference for all ranks of a role: medians of the others, as blame takes them, would make the skew too wide.
    """
    value = work.work_ns[rows].astype(np.float64)
    cell = work.role[rows] * work.num_positions + work.position[rows]
    usual = grouped_medians(cell, value, int(cell.max()) + 1)
    beyond: Floats = value - usual[cell]
    return beyond


def _clock_error_ns(measured: Measured) -> float:
    """Return the largest over ranks of the median half-width: an operation's error is that of its worst clock."""
    halfwidths: list[Floats] = [
        clock.to_reference(end_ns).halfwidth_ns
        for clock, end_ns in zip(measured.timed.clocks, measured.chosen.end_ns, strict=True)
    ]
    return max(float(np.median(halfwidth_ns)) for halfwidth_ns in halfwidths)
