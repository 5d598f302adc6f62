"""How long each rank works in each step: the noise, and the faults that slow computation or input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.score.scenario import EVERYWHERE, NUM_WARMUP, Scenario

MS = 1e6
DATA_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 1 * MS, 33 * MS, 67 * MS, 3 * MS
COMPUTE_NS = FORWARD_NS + BACKWARD_NS
WARMUP_FACTOR = 1.5
LEAST_FACTOR = 0.5
WAIT_SPREAD = 0.3
NOISE_PERIOD_STEPS = 10
SERVICE_PERIOD_NS = 1500 * MS
TRANSIENT_SHARE = 0.25
# Of a piece of a step against the step: what the pieces' own noise is, next to what all of a step have in common.
_PIECE_SHARE = 0.3
_OWN_SHARE = 0.2

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Nanoseconds of work; the last axis is the rank.

    Attributes:
        data, optimizer: (total_steps, num_ranks).
        forward: (total_steps, num_pieces, num_ranks): a piece a microbatch, or one where there is no pipeline.
        backward: (total_steps, num_pieces, num_ranks): a piece a microbatch, or one a bucket.
        service: which ranks a periodic service disturbs, bool, (total_steps, num_ranks).
    """

    data: FloatArray
    forward: FloatArray
    backward: FloatArray
    optimizer: FloatArray
    service: NDArray[np.bool_]


def work_of(scenario: Scenario, *, with_noise: bool = True, with_fault: bool = True) -> Work:
    """Return the work of a scenario; the noise is the same with and without the fault."""
    shape = (scenario.total_steps, scenario.num_ranks)
    is_pipeline = scenario.num_stages > 1
    num_forward = scenario.num_microbatches if is_pipeline else 1
    num_backward = scenario.num_microbatches if is_pipeline else scenario.num_buckets
    random = scenario.random("pieces")
    level = scenario.level if with_noise else 0.0
    factor = noise_factors(scenario) if with_noise else np.ones(shape)
    service = service_activations(scenario) if scenario.fault == "periodic_service" else np.zeros(shape, bool)
    if with_fault:
        factor = factor * fault_factors(scenario) + scenario.size * service
    factor[:NUM_WARMUP] *= WARMUP_FACTOR

    def pieces(number: int, total_ns: float) -> FloatArray:
        own = random.normal(0.0, _PIECE_SHARE * level, (shape[0], number, shape[1])) if level else 0.0
        return np.broadcast_to(factor[:, None, :] * (1.0 + own), (shape[0], number, shape[1])) * (total_ns / number)

    data = DATA_NS * random.lognormal(0.0, 0.05, shape)
    if with_fault and scenario.fault == "input_bound":
        data += scenario.size * COMPUTE_NS * scenario.random("input").lognormal(0.0, 0.2, shape)
    return Work(
        data=data,
        forward=pieces(num_forward, FORWARD_NS),
        backward=pieces(num_backward, BACKWARD_NS),
        optimizer=OPTIMIZER_NS * factor,
        service=service,
    )


def noise_factors(scenario: Scenario) -> FloatArray:
    """Return the noise as factors of mean 1 and standard deviation `level`, (total_steps, num_ranks).

    The ranks' own speeds come on top.
    """
    random = scenario.random("noise")
    shape, level = (scenario.total_steps, scenario.num_ranks), scenario.level
    own = random.standard_normal(shape)
    if scenario.noise == "normal":
        deviation = level * own
    elif scenario.noise == "lognormal":
        variance = np.log1p(level**2)
        deviation = np.exp(np.sqrt(variance) * own - variance / 2) - 1
    elif scenario.noise == "heavy":
        deviation = level * random.standard_t(3, shape) / np.sqrt(3)
    elif scenario.noise == "periodic":
        begin = random.integers(NOISE_PERIOD_STEPS, size=shape[1])
        is_busy = (np.arange(shape[0])[:, None] + begin) % NOISE_PERIOD_STEPS == 0
        share = 1 / NOISE_PERIOD_STEPS
        deviation = level * (is_busy - share) / np.sqrt(share * (1 - share)) + _OWN_SHARE * level * own
    elif scenario.noise == "common_mode":
        deviation = level * random.standard_normal((shape[0], 1)) + _OWN_SHARE * level * own
    else:
        of_node = random.standard_normal((shape[0], scenario.num_nodes))
        deviation = level * of_node[:, scenario.node_of_rank] + _OWN_SHARE * level * own
    speed = 1.0 + scenario.spread * scenario.random("spread").standard_normal(shape[1])
    return np.maximum(1.0 + deviation, LEAST_FACTOR) * speed


def fault_factors(scenario: Scenario) -> FloatArray:
    """Return by what the fault slows the computation of each rank, (total_steps, num_ranks)."""
    factors = np.ones((scenario.total_steps, scenario.num_ranks))
    random = scenario.random("fault")
    affected = list(scenario.affected_ranks)
    if scenario.fault in ("slow_rank", "slow_node", "slow_stage"):
        factors[:, affected] += scenario.size
    elif scenario.fault == "transient":
        length = max(int(TRANSIENT_SHARE * scenario.num_steps), 1)
        first = NUM_WARMUP + int(random.integers(scenario.num_steps - length + 1))
        factors[first : first + length, affected] += scenario.size
    elif scenario.fault == "rotating":
        steps = np.arange(scenario.total_steps)
        cycles = random.permuted(
            np.tile(np.arange(scenario.num_ranks), (-(-len(steps) // scenario.num_ranks), 1)), axis=1
        )
        factors[steps, cycles.ravel()[: len(steps)]] += scenario.size
    return factors + core_waits(scenario)


def core_waits(scenario: Scenario) -> FloatArray:
    """Return how long each rank waits for a core, relative to its computation of a step, (total_steps, num_ranks)."""
    waits = np.zeros((scenario.total_steps, scenario.num_ranks))
    if scenario.fault not in ("shared_cores", "foreign_load"):
        return waits
    ranks = list(scenario.affected_ranks) or list(range(scenario.num_ranks))
    varying = scenario.random("fault").lognormal(-(WAIT_SPREAD**2) / 2, WAIT_SPREAD, (len(waits), len(ranks)))
    waits[:, ranks] = scenario.size * varying
    return waits


def service_activations(scenario: Scenario) -> NDArray[np.bool_]:
    """Return in which steps a service that recurs by the clock takes a rank's time, bool, (total_steps, num_ranks)."""
    nominal_ns = DATA_NS + COMPUTE_NS + OPTIMIZER_NS
    begin_ns = scenario.random("fault").uniform(0, SERVICE_PERIOD_NS, scenario.num_nodes)
    time_ns = np.arange(scenario.total_steps)[:, None] * nominal_ns + begin_ns
    is_active = time_ns % SERVICE_PERIOD_NS < nominal_ns
    if scenario.resolved_target != EVERYWHERE:
        is_active &= np.arange(scenario.num_nodes) == scenario.resolved_target
    return np.asarray(is_active[:, scenario.node_of_rank])
