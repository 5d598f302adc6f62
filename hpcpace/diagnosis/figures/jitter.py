"""The figures of jitter: of the set of ranks that loses most time by waiting for its slowest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.diagnose import Panels
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.summary import Growth, Jitter, Prediction, Predictions
from hpcpace.metrics.jitter.amplification import amplification, noise_amplification, noise_intensity, noise_shares
from hpcpace.metrics.jitter.bound_switches import bound_switches
from hpcpace.metrics.jitter.extrapolation import Refusal, TransferTerm, extrapolate
from hpcpace.metrics.jitter.growth import GrowthCurve, work_growth
from hpcpace.metrics.jitter.null_model import NullModel, null_model
from hpcpace.metrics.jitter.variance_shares import WorkParts, split_work
from hpcpace.metrics.lateness.segments import SegmentPanel, segment_panels
from hpcpace.trace.schema import Op

_FACTORS = (1, 2, 4, 8, 16)


def jitter_figures(
    measured: Measured, panels: Panels, transfer: TransferTerm | None = None
) -> tuple[Jitter | None, GrowthCurve | None]:
    """Return the figures of jitter and the curve behind them.

    None where no two ranks wait for each other, or own work is not known. `transfer` is how transfers grow with nodes,
    where a probe says so.
    """
    if panels.host_timed:
        return None, None
    panel = _largest_loss(measured, panels)
    if panel is None or panel.work_ns.shape[1] < 2:
        return None, None
    rows = np.searchsorted(panels.rank, panel.members)
    work_ns, node = panel.work_ns, panels.node[rows]
    found = amplification(work_ns)
    if found is None:
        return None, None
    parts = split_work(work_ns, node)
    null = null_model(work_ns, node, parts=parts)
    shares, bound = noise_shares(work_ns), bound_switches(panels.work_ns.mean(axis=0), panels.transfer_ns.mean(axis=0))
    curve = _curve(work_ns, parts, null)
    columns = np.isin(measured.chosen.step, panel.step)
    is_everywhere = len(np.unique(node)) == len(np.unique(panels.node))
    jitter = Jitter(
        ranks=panel.members,
        num_steps=work_ns.shape[1],
        num_segments=work_ns.shape[2],
        amplification=found.amplification,
        interval=(found.low, found.high) if found.low is not None and found.high is not None else None,
        persistent=found.persistent,
        persistent_null=found.persistent_null,
        transient=found.transient,
        loss_share=found.loss_ns / panels.mean_time_ns,
        null=null.expected if null else None,
        null_interval=(null.low, null.high) if null else None,
        comparison=str(null.comparison) if null else "",
        is_node_unit=bool(null and null.is_node_unit),
        common_share=shares.common if shares else None,
        rank_share=shares.rank if shares else None,
        residual_share=shares.residual if shares else None,
        noise_intensity=noise_intensity(work_ns),
        # A pipeline's step is longer than any rank's work by its bubble, which is no noise. Nor are waits that look
        # like transfers.
        noise_amplification=noise_amplification(
            panels.times_ns[columns], work_ns, panels.transfer_ns.mean(axis=0)[columns]
        )
        if len(np.unique(panels.stage)) == 1 and measured.are_waits_known
        else None,
        compute_bound_share=bound.compute_share if bound else None,
        num_regime_switches=bound.num_switches if bound else 0,
        growth=_growth(curve),
        predictions=_predictions(work_ns, node, parts, panels.mean_time_ns, transfer if is_everywhere else None),
    )
    return jitter, curve


def _curve(work_ns: NDArray[np.float64], parts: WorkParts | None, null: NullModel | None) -> GrowthCurve | None:
    curve = work_growth(work_ns, parts) if parts is not None else None
    if curve is None or curve.null is None or null is None:
        return curve
    # With all units it is what the null model has from many more draws.
    return replace(curve, null=np.append(curve.null[:-1], null.expected))


def _largest_loss(measured: Measured, panels: Panels) -> SegmentPanel | None:
    """Return the work of the ranks that wait for each other, of the set that loses most."""
    found = _panels_of_groups(measured)
    if not found and panels.is_role_known:
        found = [_of_role(panels, measured, value) for value in np.unique(panels.role)]
    found = [panel for panel in found if panel is not None and len(panel.members) > 1]
    return max(found, key=lambda panel: _loss_ns(panel.work_ns), default=None)


def _loss_ns(work_ns: NDArray[np.float64]) -> float:
    return float((work_ns.max(axis=0) - work_ns.mean(axis=0)).mean(axis=0).sum()) if work_ns.size else 0.0


def _panels_of_groups(measured: Measured) -> list[SegmentPanel]:
    close_up = measured.close_up
    if close_up is None:
        return []
    found = segment_panels(
        close_up.evidence.operations,
        close_up.steps,
        close_up.work,
        ranks=close_up.ranks,
        blocks=close_up.blocks,
    )
    return list(found)


def _of_role(panels: Panels, measured: Measured, value: int) -> SegmentPanel:
    rows = panels.role == value
    return SegmentPanel(
        members=tuple(panels.rank[rows].tolist()),
        step=measured.chosen.step,
        work_ns=panels.work_ns[rows][:, :, None],
        op=np.array([Op.ALL_REDUCE], np.uint8),
        num_left_out=0,
    )


def _growth(curve: GrowthCurve | None) -> Growth | None:
    if curve is None:
        return None

    def values(array: NDArray[np.float64] | None) -> tuple[float, ...]:
        return tuple(array.tolist()) if array is not None else ()

    interval = None
    if curve.exponent_low is not None and curve.exponent_high is not None:
        interval = (curve.exponent_low, curve.exponent_high)
    return Growth(
        k=tuple(curve.k.tolist()),
        amplification=values(curve.amplification),
        low=values(curve.low),
        high=values(curve.high),
        null=values(curve.null),
        exponent=curve.exponent,
        exponent_interval=interval,
    )


def _predictions(
    work_ns: NDArray[np.float64],
    node: NDArray[np.int64],
    parts: WorkParts | None,
    mean_time_ns: float,
    transfer: TransferTerm | None,
) -> Predictions:
    num_nodes = len(np.unique(node)) * np.array(_FACTORS, np.int64)
    found = extrapolate(work_ns, node, num_nodes, parts=parts, transfer=transfer)
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
            found.num_nodes, found.loss_ns, found.low_ns, found.high_ns, found.is_speculative, strict=True
        )
    )
    return Predictions(refused="", label=found.label, points=points)
