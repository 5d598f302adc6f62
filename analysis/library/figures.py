"""The figures of a study, from the traces and results of its runs, and their spread.

Nothing here needs torch or MPI: a login node can read the studies of any cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace.core.errors import CannotTell, TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.frames.run import load
from hpcpace.studies.setups import DONE, Setup, StudyFolder, StudyRun

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity over the repetitions of a set-up; the raw values stay with the runs."""

    median: float
    low: float
    high: float
    num: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return median, minimum and maximum of the repetitions that have a value; None if none has one."""
    known = np.array([value for value in values if value is not None and np.isfinite(value)])
    if not len(known):
        return None
    return Spread(median=float(np.median(known)), low=float(known.min()), high=float(known.max()), num=len(known))


def spelled(found: Spread | None, of: Callable[[float], str], *, is_ranged: bool = True) -> str:
    """Return the median as text, and on a second line the range of several repetitions; empty if it is not known."""
    if found is None:
        return ""
    return of(found.median) + (f"\n{of(found.low)}-{of(found.high)}" if is_ranged and found.num > 1 else "")


def scaling_factor(samples_per_s: float, num_ranks: int, samples_per_s_of_one: float) -> float:
    """Return throughput relative to as many single ranks without communication, R_n / (n R_1); 1 is ideal."""
    return samples_per_s / (num_ranks * samples_per_s_of_one)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line by least squares: `slope` per unit of x, `r_squared` 1 if all points are on it."""

    slope: float
    intercept: float
    r_squared: float


def straight_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Return the line through points with its coefficient of determination; None for fewer than three points."""
    if len(x) < 3 or len(set(x)) < 2:
        return None
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(across, up, 1)
    total = float(((up - up.mean()) ** 2).sum())
    rest = float(((up - slope * across - intercept) ** 2).sum())
    return Line(slope=float(slope), intercept=float(intercept), r_squared=1 - rest / total if total else 1.0)


LOOPBACK = "lo"
_BITS = 8


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of one run; None if the run does not have them.

    Attributes:
        samples_per_s: throughput of all ranks, over the steps after the warm-up.
        step_ms: median step time.
        network_bps: bits per second in both directions of a server's busiest interface except the loopback, mean of
            servers.
        network_bytes_per_sample: bytes on that interface per sample.
        peak_memory_bytes: maximum over ranks, of the GPU's memory if the rank has a GPU.
        tensor_memory_bytes: maximum over ranks of the bytes of parameters, gradients, optimizer and activations.
        forward_ms: forward computation of one microbatch through the whole model, without communication.
        communication_share: share of the ranks' time in exposed communication, waits and transfers together.
    """

    samples_per_s: float | None = None
    step_ms: float | None = None
    network_bps: float | None = None
    network_bytes_per_sample: float | None = None
    peak_memory_bytes: float | None = None
    tensor_memory_bytes: float | None = None
    forward_ms: float | None = None
    communication_share: float | None = None


FIGURES = tuple(field.name for field in fields(RunFigures))


@dataclass(frozen=True, kw_only=True)
class SetupFigures:
    """A set-up over its repetitions.

    Attributes:
        setup: what was run.
        states: how many runs are finished, out of memory, failed or open.
        spreads: of each of `FIGURES`, and of scaling_factor; None if no repetition has it.
        runs: the figures of each finished repetition.
    """

    setup: Setup
    states: Mapping[str, int]
    spreads: Mapping[str, Spread | None]
    runs: tuple[RunFigures, ...]

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the repetitions."""
        found = self.spreads[name]
        return None if found is None else found.median


def study_figures(study: StudyFolder) -> tuple[list[SetupFigures], list[str]]:
    """Return the figures of all set-ups of a study, in the order of its plan, and the runs that could not be read.

    Args:
        study: with a plan.

    Raises:
        CannotTell: no run of it is finished.
    """
    runs = study.runs()
    found: dict[Setup, list[RunFigures]] = {run.setup: [] for run in runs}
    states: dict[Setup, list[str]] = {run.setup: [] for run in runs}
    problems: list[str] = []
    for run in runs:
        states[run.setup].append(study.state(run))
        if states[run.setup][-1] == DONE:
            try:
                found[run.setup].append(run_figures(study, run))
            except (TraceError, CannotTell) as error:
                problems.append(f"{run.name}: {error}")
    if not any(found.values()):
        raise CannotTell(f"no run of {study.path} is finished: {'; '.join(problems[:3]) or 'run it first'}")
    single = {
        _family(setup): spread([run.samples_per_s for run in done])
        for setup, done in found.items()
        if setup.layout.num_ranks == 1
    }
    rows = [_of_setup(setup, states[setup], done, single.get(_family(setup))) for setup, done in found.items()]
    return rows, problems


def run_figures(study: StudyFolder, run: StudyRun) -> RunFigures:
    """Return the figures of a finished run.

    Raises:
        TraceError: no trace of it can be read.
        CannotTell: it has no step behind the warm-up that all ranks have.
    """
    attempt = study.run_dir(run).last_attempt()
    return attempt_figures(attempt, run.setup, study.result(attempt))


def attempt_figures(attempt: Attempt, setup: Setup, result: Mapping[str, Any]) -> RunFigures:
    """Return the figures of a finished attempt.

    Args:
        attempt: with traces.
        setup: what was trained, and where.
        result: the content of its result.json.

    Raises:
        TraceError: no trace of it can be read.
        CannotTell: it has no step behind the warm-up that all ranks have.
    """
    run = load(attempt.path, warns=False)
    steps, parts = run.steps.drop_duplicates("step"), run.parts
    samples, wall_s = int(steps.samples.sum()), steps.step_time_ns.sum() / NS_PER_S
    traffic = traffic_of(run.steps, run.ranks, run.network) if setup.layout.servers > 1 else None
    is_timed = bool(parts.forward_ns.notna().all())  # else they are host times of ranks with a device
    forward_ns = parts.groupby("step").forward_ns.sum() / (setup.num_replicas * setup.microbatches)
    communication_ns = parts.exposed_wait_ns.sum() + parts.exposed_transfer_ns.sum()
    memory = result.get("peak_memory", [])
    device = [row["device_bytes"] for row in memory]
    return RunFigures(
        samples_per_s=samples / wall_s if samples and wall_s else None,
        step_ms=float(steps.step_time_ns.median()) / NS_PER_MS,
        network_bps=traffic[0] if traffic else None,
        network_bytes_per_sample=traffic[1] / samples if traffic and samples else None,
        peak_memory_bytes=max(device, default=0) or max((row["rss_bytes"] for row in memory), default=None),
        tensor_memory_bytes=max(filter(None, map(_tensor_bytes, memory)), default=None),
        forward_ms=float(forward_ns.median()) / NS_PER_MS if is_timed else None,
        communication_share=communication_ns / run.steps.duration_ns.sum() if is_timed else None,
    )


def _tensor_bytes(row: Mapping[str, Any]) -> int | None:
    parts = [row.get(f"{name}_bytes") for name in ("parameters", "gradients", "optimizer", "activations")]
    known = [part for part in parts if isinstance(part, int)]
    return sum(known) if len(known) == len(parts) else None


def traffic_of(steps: DataFrame, ranks: DataFrame, network: DataFrame) -> tuple[float, float] | None:
    """Return bits per second and bytes in the used steps of a server's busiest interface, mean of servers.

    Bits per second are those of all intervals of the counters in these steps. The ranks of a pipeline are not all at
    the same step, so these intervals take longer than the steps; bytes are those of the mean rank's time. None without
    counters, or where they cover less than half of the time.

    Args:
        steps, ranks, network: frames of a run, as `hpcpace.load` has them.
    """
    times = steps.groupby("rank").agg(begin_ns=("begin_ns", "min"), end_ns=("end_ns", "max")) / NS_PER_S
    own_s = (times.end_ns - times.begin_ns).groupby(ranks.set_index("rank").host, observed=True).mean()
    counted = network[network.interface != LOOPBACK]
    of_interval = counted[["host", "interface"]].assign(
        num_bytes=counted.sent_bytes + counted.received_bytes, time_s=(counted.end_ns - counted.begin_ns) / NS_PER_S
    )
    total = of_interval.groupby(["host", "interface"], observed=True).sum()
    total = total[2 * total.time_s >= times.end_ns.max() - times.begin_ns.min()]
    if not len(total):
        return None
    rates = (total.num_bytes / total.time_s).groupby("host", observed=True).max()
    return float(_BITS * rates.mean()), float((rates * own_s).mean())


def _family(setup: Setup) -> tuple[Any, ...]:
    """Return the key that set-ups share if their scaling is compared."""
    return setup.model, setup.preset, setup.batch, setup.shrink


def _of_setup(setup: Setup, states: Sequence[str], runs: Sequence[RunFigures], single: Spread | None) -> SetupFigures:
    spreads = {name: spread([getattr(run, name) for run in runs]) for name in FIGURES}
    scaling: list[float | None] = [
        scaling_factor(run.samples_per_s, setup.layout.num_ranks, single.median)
        for run in runs
        if single is not None and run.samples_per_s is not None
    ]
    return SetupFigures(
        setup=setup,
        states={state: states.count(state) for state in dict.fromkeys(states)},
        spreads={**spreads, "scaling_factor": spread(scaling)},
        runs=tuple(runs),
    )
