"""Made-up verdicts and plot data with every plot, for the HTML report; their shapes and edges are what is tested."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.plot_data import Bandwidth, CoreTimes, HostClock, Lane, Matrix, PlotData, SlowStep
from hpcpace.diagnosis.summary import Growth, Summary
from hpcpace.metrics.phases import Part
from hpcpace.report.run_report import run_document
from hpcpace.report.terminal import print_document
from hpcpace.trace.attempt_reader import read_attempt

NASTY = "<script>alert(1)</script>\x1b[2J"


@dataclass(frozen=True, kw_only=True)
class SampleCulprit:
    kind: str = "rank"
    id: str = "2"
    aliases: tuple[str, ...] = ("rank 2", "node n1")
    effect: float = 0.302
    interval: tuple[float, float] = (0.281, 0.323)


@dataclass(frozen=True, kw_only=True)
class SampleVerdict:
    mode: str = "persistent straggler"
    confidence: float = 0.98
    headline: str = "persistent straggler: rank 2 on n1 costs 19.8 % of the step time"
    why: tuple[str, ...] = (
        "own work 30.2 % above the median of its role (95 %: 28.1 % to 32.3 %); the others wait for it",
    )
    next: tuple[str, ...] = (
        "check clock speeds, throttling, pinning and other processes there, or leave it out: #SBATCH --exclude=n1",
    )
    also: tuple[str, ...] = ("synchronisation amplification: every step waits for its slowest rank, which costs 3.1 %",)
    culprits: tuple[SampleCulprit, ...] = (SampleCulprit(),)


HEALTHY = SampleVerdict(
    mode="healthy",
    confidence=0.95,
    headline="healthy: no straggler, contention, imbalance or amplified jitter above the thresholds",
    why=("a rank 1.3 % slower than its role would have been detected",),
    next=("nothing: to go faster, change the job, not the cluster",),
    also=(),
    culprits=(),
)


def sample_summary(path: Path, **settings: object) -> Summary:
    """Return the summary of a synthetic run."""
    run = SyntheticRun(**settings).write(path)
    attempt = run.attempts()[-1]
    found = read_attempt(attempt)
    return analyze_traces(run, attempt, found, Selection()).summary


def sample_core_times(hosts: tuple[str, ...]) -> CoreTimes:
    """Return times of ranks that wait for a core in one phase, the later ones longer; the other is not known."""
    shape = (len(hosts), 2)
    waiting = np.zeros(shape)
    waiting[:, 0] = np.arange(len(hosts))
    return CoreTimes(
        ranks=tuple(range(len(hosts))),
        hosts=hosts,
        phases=("forward", "backward"),
        running_ms=np.full(shape, [10.0, 0.0]),
        queued_ms=waiting,
        idle_ms=np.zeros(shape),
        unknown_ms=np.full(shape, [0.0, 20.0]),
    )


def sample_plots(
    *, num_ranks: int = 4, num_steps: int = 38, num_nodes: int = 4, hosts: tuple[str, ...] = ("n0", "n1"), seed: int = 1
) -> PlotData:
    """Return data for every plot; rank 2 is slow, and the last node has a slow link."""
    random = np.random.default_rng(seed)
    step = np.arange(2, 2 + num_steps)
    delay_ms = random.normal(0, 0.8, (num_ranks, num_steps)) + random.exponential(0.3, (1, num_steps))
    delay_ms[min(2, num_ranks - 1)] += 9
    delay_ms[:, num_steps // 2] += 5
    k = np.unique(np.geomspace(1, num_ranks, min(num_ranks, 20)).astype(np.int64))
    curve = 1 + 0.04 * np.log2(k + 1.0) ** 1.3
    labels = tuple(hosts[rank * len(hosts) // num_ranks] for rank in range(num_ranks))
    transfer = random.gamma(40, 0.025, (num_nodes, num_nodes))
    transfer[-1] *= 3
    transfer[np.diag_indices(num_nodes)] = np.nan
    none = np.zeros(num_steps)
    leaves = max(num_nodes // 4, 2)
    time_s = np.linspace(0, 120, 61)
    lane = {"part": ("forward", "backward", "wait", "transfer"), "begin_ms": np.array([0.0, 10.0, 30.0, 39.0])}
    lanes = tuple(
        Lane(rank=rank, host=labels[rank], **lane, end_ms=np.array([10.0, 30.0, 39.0, 41.0]))
        for rank in range(min(num_ranks, 16))
    )
    slow_step = SlowStep(
        step=9, time_ms=41.0, median_ms=38.0, slowest=9, slowest_ms=41.0, num_ranks=num_ranks, lanes=lanes
    )
    return PlotData(
        slow_step=slow_step,
        core_times=sample_core_times(labels),
        bandwidths=tuple(
            Bandwidth(
                op="all_reduce",
                group_size=4,
                size_bytes=size,
                low=size * 1e3,
                median=size * 2e3,
                high=size * 4e3,
                bus_factor=1.5,
            )
            for size in (80, 1 << 20)
        ),
        step=step,
        parts_ms={
            part.name.lower(): random.gamma(2, 1.5, num_steps) if part in (Part.FORWARD, Part.SYNC_WAIT) else none
            for part in Part
        },
        step_ms=36 + random.gamma(2, 1.5, num_steps) + 8 * (step % 25 == 0),
        own_delay_ms=delay_ms,
        rank_labels=tuple(f"{rank} {label}" for rank, label in enumerate(labels)),
        communication_share=np.clip(0.4 + 0.2 * np.sin(step / 9) + random.normal(0, 0.05, num_steps), 0, 1),
        growth=Growth(
            k=tuple(k.tolist()),
            amplification=tuple(curve),
            low=tuple(curve * 0.985),
            high=tuple(curve * 1.015),
            null=tuple(1 + 0.8 * (curve - 1)),
            exponent=None,
            exponent_interval=None,
        ),
        leaf_matrix=Matrix(
            labels=tuple(f"leaf{leaf}" for leaf in range(leaves)), ratio=random.gamma(9, 0.11, (leaves, leaves))
        ),
        node_matrix=Matrix(labels=tuple(f"n{node}" for node in range(num_nodes)), ratio=transfer),
        clocks=tuple(
            HostClock(
                host=host,
                time_s=time_s,
                halfwidth_us=12 + 3 * index + 4 * (time_s % 10) / 10 + random.gamma(2, 0.5, len(time_s)),
                allowed_us=np.full(len(time_s), 30.0),
                residual_us=np.where(np.arange(len(time_s)) % 5 == 0, random.normal(0, 5, len(time_s)), np.nan),
            )
            for index, host in enumerate(dict.fromkeys(hosts))
        ),
        versions=(("python", "3.11.9"), ("torch", "2.11.0")),
    )


def print_report(console: Console, summary: Summary) -> None:
    """Print the report of a run without plots."""
    print_document(console, run_document(summary, summary.verdict, PlotData()))
