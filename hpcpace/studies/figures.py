"""The figures of a study, from the traces and results of its runs, and their spread.

Nothing here needs torch or MPI: a login node can read the studies of any cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import CannotTell, TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Measured, Selection, measure
from hpcpace.metrics.phases import Part
from hpcpace.metrics.steps import throughput
from hpcpace.studies.setups import DONE, Setup, StudyFolder, StudyRun
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.tables import RankTrace


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


def counted_between(
    time_ns: NDArray[np.int64], count: NDArray[np.int64], begin_ns: int, end_ns: int
) -> tuple[float, float] | None:
    """Return how much a counter grew within a period and in how many seconds, or None.

    Between two readings the counter is taken to grow evenly. Where the readings cover less than the time, the part
    that they cover counts, and its length is returned; where they cover less than half of it there is no answer.

    Args:
        time_ns: times of the readings, ascending, int64, (num_readings,).
        count: what they read, int64, (num_readings,).
        begin_ns: begin of the time, on the same clock.
        end_ns: its end.
    """
    if len(time_ns) < 2 or end_ns <= begin_ns:
        return None
    first, last = max(begin_ns, int(time_ns[0])), min(end_ns, int(time_ns[-1]))
    if 2 * (last - first) < end_ns - begin_ns:
        return None
    # Relative to the first reading: differences of counters are small compared with what float64 holds exactly.
    grown = np.interp([first - time_ns[0], last - time_ns[0]], time_ns - time_ns[0], count - count[0])
    return float(grown[1] - grown[0]), (last - first) / 1e9


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
_COMMUNICATION = (Part.SYNC_WAIT, Part.SYNC_TRANSFER, Part.WAIT, Part.TRANSFER)


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
    traces = read_attempt(attempt, tables=(*TABLES_USED, "network")).traces
    measured = measure(traces, Selection())
    speed = throughput(measured.times_ns, measured.chosen.samples)
    traffic = traffic_of(traces, measured) if setup.layout.servers > 1 else None
    memory = result.get("peak_memory", [])
    device = [row["device_bytes"] for row in memory]
    return RunFigures(
        samples_per_s=speed.samples_per_s,
        step_ms=speed.p50_ns / NS_PER_MS,
        network_bps=traffic[0] if traffic else None,
        network_bytes_per_sample=traffic[1] / speed.samples if traffic and speed.samples else None,
        peak_memory_bytes=max(device, default=0) or max((row["rss_bytes"] for row in memory), default=None),
        tensor_memory_bytes=max(filter(None, map(_tensor_bytes, memory)), default=None),
        forward_ms=_forward_ms(measured, setup),
        communication_share=_communication_share(measured),
    )


def _tensor_bytes(row: Mapping[str, Any]) -> int | None:
    parts = [row.get(f"{name}_bytes") for name in ("parameters", "gradients", "optimizer", "activations")]
    known = [part for part in parts if isinstance(part, int)]
    return sum(known) if len(known) == len(parts) else None


def _communication_share(measured: Measured) -> float | None:
    """Return the share of communication; None where phases are host times of ranks with a device."""
    if measured.host_timed:
        return None
    return float(measured.parts[..., list(_COMMUNICATION)].sum() / measured.parts.sum())


def _forward_ms(measured: Measured, setup: Setup) -> float | None:
    """Return the forward computation of a microbatch: all ranks of a replica, median over steps; None as above."""
    if measured.host_timed:
        return None
    per_step = measured.parts[..., Part.FORWARD].sum(axis=0) / (setup.num_replicas * setup.microbatches)
    return float(np.median(per_step)) / NS_PER_MS


def traffic_of(traces: Sequence[RankTrace], measured: Measured) -> tuple[float, float] | None:
    """Return bits per second and bytes in the used steps of a server's busiest interface; None without counters.

    A server is counted from its first rank's begin to its last rank's end, by its own clock. The ranks of a pipeline
    are not all at the same step, so that this is longer than the steps; bytes are those of the mean rank's time.
    """
    rates: list[float] = []
    volumes: list[float] = []
    nodes = np.array([trace.header.node for trace in traces])
    for node in np.unique(nodes):
        rows = np.flatnonzero(nodes == node).tolist()
        begin_ns, end_ns = int(measured.chosen.begin_ns[rows, 0].min()), int(measured.chosen.end_ns[rows, -1].max())
        counted = [found for row in rows for found in _counted(traces[row], begin_ns, end_ns)]
        if counted:
            count, duration_s = max(counted)
            rates.append(_BITS * count / duration_s)
            own_ns = (measured.chosen.end_ns[rows, -1] - measured.chosen.begin_ns[rows, 0]).mean()
            volumes.append(count * float(own_ns) / NS_PER_S / duration_s)
    return (float(np.mean(rates)), float(np.mean(volumes))) if rates else None


def _counted(trace: RankTrace, begin_ns: int, end_ns: int) -> Iterator[tuple[float, float]]:
    """Yield the bytes of each interface except the loopback, both directions, and the seconds they cover."""
    table = trace.tables["network"]
    for number, name in enumerate(trace.header.interfaces):
        of_interface = table.select(table["interface"] == number)
        total = of_interface["tx_bytes"] + of_interface["rx_bytes"]
        counted = counted_between(of_interface["time_ns"], total, begin_ns, end_ns)
        if name != LOOPBACK and counted is not None:
            yield counted


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
