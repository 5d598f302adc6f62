"""The constants of a machine from measured steps, for `machines.toml`, and how far off predictions of others are.

Constants are found by Gauss-Newton on logarithms, with a prior at those of a known machine and with Huber's weights,
since published and recorded steps have outliers. The error of a prediction comes from steps that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcpace.metrics import Bools, Floats
from hpcpace.planning.engine import Job
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import Machine
from hpcpace.planning.steps import steps_of

_PRIOR = 0.7  # statistics: standard deviation of a constant around its prior, logarithmic: a factor of two
_NOISE = 0.05  # statistics: of a measured step, logarithmic; residuals above it weigh less and less (Huber 1964)
_NUM_ROUNDS = 30  # statistics: of Gauss-Newton; it is done after some 10
_STEP = 1e-4  # statistics: of the numeric derivative, logarithmic
_DONE = 1e-3  # statistics: largest change of a constant at which the search ends, logarithmic
FITTED = ("flops", "memory_rate", "layer_s", "node_rate", "node_latency_s", "network_rate", "network_latency_s")
"""The constants of a machine that measurements give."""
LEVEL = 0.9
"""Share of steps that intervals hold."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured steps of one job, float64, (num_layouts,)."""

    job: Job
    layouts: Layouts
    step_s: Floats


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine that fits measured steps.

    Attributes:
        machine: with the constants found.
        errors: logarithm of measured over predicted, of each step while it was left out, float64, (num_steps,).
    """

    machine: Machine
    errors: Floats

    @property
    def half_width(self) -> float:
        """Half-width of an interval around a prediction, logarithmic, at `LEVEL` (conformal; Barber et al. 2021)."""
        return conformal_half_width(self.errors)


def conformal_half_width(errors: Floats) -> float:
    """Return the least half-width that holds a new error at `LEVEL`; infinite where errors are too few to say."""
    rank = math.ceil(LEVEL * (len(errors) + 1))
    return float(np.sort(np.abs(errors))[rank - 1]) if rank <= len(errors) else math.inf


def fit(measured: Sequence[Measured], prior: Machine) -> Fit:
    """Find the machine that explains measured steps.

    Args:
        measured: of jobs on one kind of machine; each job's own machine is replaced.
        prior: a known machine like it.
    """
    num_steps = sum(len(one.layouts) for one in measured)
    logs = _search(measured, prior, np.ones(num_steps, bool), np.zeros(len(FITTED)))
    found = _scaled(prior, logs)
    errors = np.empty(num_steps)
    for index, used in enumerate(~np.eye(num_steps, dtype=bool)):
        errors[index] = _residuals(measured, _scaled(prior, _search(measured, prior, used, logs)))[index]
    return Fit(machine=found, errors=errors)


def _search(measured: Sequence[Measured], prior: Machine, used: Bools, start: Floats) -> Floats:
    """Return the logarithms of constants over their prior that explain some of the steps."""

    def residuals(logs: Floats) -> Floats:
        return _residuals(measured, _scaled(prior, logs))[used]

    return gauss_newton(residuals, start)


def gauss_newton(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Return the logarithms of constants over their prior, float64, (num_constants,), that leave least residuals."""
    logs, num_constants = start, len(start)
    cost = math.inf
    damping = 1.0
    for _ in range(_NUM_ROUNDS):
        now = residuals(logs)
        weights = np.minimum(1.0, _NOISE / np.maximum(np.abs(now), _NOISE)) / _NOISE**2
        slopes = np.stack([(residuals(logs + _STEP * one) - now) / _STEP for one in np.eye(num_constants)], axis=1)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.eye(num_constants) / _PRIOR**2
        change = np.linalg.solve(curvature, -slopes.T @ (weights * now) - logs / _PRIOR**2).astype(np.float64)
        logs, cost, damping = _line_search(residuals, logs, change, cost, damping)
        if np.abs(damping * change).max() < _DONE:
            break
    return logs


def _line_search(
    residuals: Callable[[Floats], Floats], logs: Floats, change: Floats, cost: float, damping: float
) -> tuple[Floats, float, float]:
    """Return constants, their cost, and the share of a change that was taken: halved while it makes them worse."""
    cost = _cost(residuals(logs), logs)
    damping = min(1.0, 2 * damping)
    while damping > _DONE:
        tried = logs + damping * change
        tried_cost = _cost(residuals(tried), tried)
        if tried_cost < cost:
            return tried, tried_cost, damping
        damping /= 2
    return logs, cost, 0.0


def _cost(residuals: Floats, logs: Floats) -> float:
    size = np.abs(residuals) / _NOISE
    huber = np.where(size <= 1, size**2 / 2, size - 0.5)
    return float(huber.sum() + (logs**2).sum() / _PRIOR**2 / 2)


def _scaled(prior: Machine, logs: Floats) -> Machine:
    return prior.scaled(**dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))


def _residuals(measured: Sequence[Measured], machine: Machine) -> Floats:
    """Return the logarithm of measured over predicted steps."""
    return np.concatenate([np.log(one.step_s / steps_of(one.job.on(machine), one.layouts).step_s) for one in measured])
