"""What comparisons with other runs need of one run: how certain its figures are, and where waits began."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.comparable_summary import Comparable, ComparedRank
from hpcpace.diagnosis.measure import Measured, Selection
from hpcpace.metrics.phases import OWN_WORK
from hpcpace.metrics.resampling import block_means, log_mean_error, log_median_error

_MOST_BLOCKS = 20
_LEAST_STEPS = 8


def comparable_figures(measured: Measured, selection: Selection) -> Comparable:
    """Return what a comparison takes from a run besides its other figures."""
    times_ns = measured.times_ns.astype(np.float64)
    has_times = bool((times_ns > 0).all())
    return Comparable(
        is_all=selection == Selection(),
        samples_per_step=float(measured.chosen.samples.mean()),
        log_p50_error=log_median_error(times_ns) if has_times else None,
        log_mean_error=log_mean_error(times_ns) if has_times else None,
        block_p50_ns=_block_medians(times_ns),
        ranks=_ranks(measured),
    )


def _block_medians(times_ns: NDArray[np.float64]) -> tuple[float, ...]:
    blocks = np.array_split(times_ns, min(_MOST_BLOCKS, len(times_ns)))
    return tuple(float(np.median(block)) for block in blocks)


def _ranks(measured: Measured) -> tuple[ComparedRank, ...]:
    work_ns = measured.parts[:, :, list(OWN_WORK)].sum(axis=2)
    num_ranks, num_steps = work_ns.shape
    mean_ns = work_ns.mean(axis=1)
    error_ns = _error_of_mean(work_ns) if num_steps >= _LEAST_STEPS else None
    caused_ns = measured.operations.origins.caused_ns / (num_ranks * num_steps)
    return tuple(
        ComparedRank(
            rank=rank,
            work_ns=float(mean_ns[row]) if (is_known := rank not in measured.host_timed) else None,
            work_error=float(error_ns[row] / mean_ns[row])
            if is_known and error_ns is not None and mean_ns[row]
            else None,
            caused_wait_ns=float(caused_ns[row]) if is_known else 0.0,
        )
        for row, rank in enumerate(measured.timed.ranks)
    )


def _error_of_mean(work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    means = block_means(work_ns)
    return np.asarray(means.std(axis=1, ddof=1) / means.shape[1] ** 0.5)
