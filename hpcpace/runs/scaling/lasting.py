"""Lasting differences between ranks: what of the work all of them have, and A(k) without the differences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.growth import maximum_weights
from hpcpace.runs.measured import MeasuredRun

FloatArray = NDArray[np.float64]


def jitter_growth(run: MeasuredRun) -> tuple[tuple[int, float], ...]:
    """Return A(k) without lasting differences, by number of units; as the run has it where work of ranks is not known.

    E[max of k] of the work has that of its means in it: a slow rank is the slowest of more units more often, which says
    nothing of single steps. What is left is waiting for whoever is late in a step.
    """
    work = _means(run)
    hosts = np.unique([rank.host for rank in run.ranks], return_inverse=True)[1]
    num_units = run.amplification[-1][0] if run.amplification else 0
    if work is None or num_units not in (len(work), int(hosts.max()) + 1):
        return run.amplification
    of_unit = work if num_units == len(work) else np.array([work[hosts == host].max() for host in range(num_units)])
    k = np.array([count for count, _ in run.amplification], np.int64)
    lasting = maximum_weights(num_units, k) @ np.sort(of_unit) / work.mean()
    points = zip(run.amplification, lasting.tolist(), strict=True)
    return tuple((count, value - of_k + 1) for (count, value), of_k in points)


def least_work(run: MeasuredRun) -> float:
    """Return the mean work of the fastest rank as a share of the mean of all; 1 where ranks' work is not known."""
    work = _means(run)
    return 1.0 if work is None else float(work.min() / work.mean())


def _means(run: MeasuredRun) -> FloatArray | None:
    """Return the mean work of each rank; None where it is not known of several ranks.

    Differences are made smaller by the share of their variance that is noise of the means (James & Stein 1961).
    """
    work = np.array([rank.work_ns for rank in run.ranks if rank.work_ns is not None], np.float64)
    if len(work) < 2 or len(work) < len(run.ranks) or work.min() <= 0:
        return None
    errors = work * np.array([rank.work_error or 0.0 for rank in run.ranks])
    variance, noise = float(np.var(work, ddof=1)), float(np.mean(errors**2))
    kept = np.sqrt(max(1 - noise / variance, 0.0)) if variance else 0.0
    return np.asarray(work.mean() + kept * (work - work.mean()))
