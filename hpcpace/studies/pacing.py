"""Paced runs compared, with the published table and with simulated jobs.

Throughput and variation always appear together: a lower variation alone is never a gain. Every policy runs in every
kind of simulated job with the published baseline, which shows the jobs that gain as published.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.config import NO_POLICY
from hpcpace.core.errors import DataError
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Selection, measure
from hpcpace.metrics.resampling import Estimate, mean_of, throughput_of_steps, variation_of_steps
from hpcpace.pace.settings import PaceSettings
from hpcpace.studies.paced_jobs import CAUSES, STRENGTHS, PacedOutcome, Scene, Target, distance, fit, paced
from hpcpace.trace.attempt_reader import read_attempt

POLICIES = ("published-window", "published-spread", "slack", "stagger")
MAX_DELAY_SHARE = 0.3
PACING_COLUMNS = (
    *("nodes", "policy", "num_runs", "samples_per_s", "samples_per_s_low", "samples_per_s_high"),
    *("variation", "variation_low", "variation_high", "gain", "gain_low", "gain_high"),
    *("published_gain", "published_variation"),
)
NEAR = 0.03
"""Largest difference between two gains that count as equal."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A policy in one kind of job, at each number of nodes.

    Attributes:
        scene: the kind of job.
        policy: the one in use.
        outcomes: by number of nodes.
        fits: whether the job has the published baseline there.
    """

    scene: Scene
    policy: str
    outcomes: tuple[PacedOutcome, ...]
    fits: tuple[bool, ...]

    @property
    def label(self) -> str:
        """The job and the policy in a few words."""
        return f"{self.scene.coupling} {self.scene.strength:g}, {self.scene.cause}: {self.policy}"


def simulations(published: Sequence[Target]) -> list[Simulation]:
    """Run every policy in every kind of job, fitted to the published baseline: about a minute for the whole table.

    Args:
        published: the table, the fewest nodes first.
    """
    found = []
    for scene in (
        Scene(coupling=coupling, strength=strength, cause=cause)
        for coupling, strengths in STRENGTHS.items()
        for strength in strengths
        for cause in CAUSES
    ):
        fitted = [fit(target, published[0], scene) for target in published]
        for policy in POLICIES:
            settings = PaceSettings(policy=policy, max_delay_share=MAX_DELAY_SHARE)
            outcomes = tuple(paced(one, settings, nodes=of.nodes) for one, of in zip(fitted, published, strict=True))
            fits = tuple(one.is_fit for one in fitted)
            found.append(Simulation(scene=scene, policy=policy, outcomes=outcomes, fits=fits))
    return found


def nearest(found: Sequence[Simulation], published: Sequence[Target]) -> list[Simulation]:
    """Return for each coupling and cause the simulation whose gains are closest to the published ones."""
    kinds = dict.fromkeys((one.scene.coupling, one.scene.cause) for one in found)
    return [
        min(
            (one for one in found if (one.scene.coupling, one.scene.cause) == kind),
            key=lambda one: distance(published, one.outcomes),
        )
        for kind in kinds
    ]


def shown(found: Sequence[Simulation], published: Sequence[Target]) -> list[Simulation]:
    """Return the simulations to show: the closest ones, and the one whose variation falls most."""
    near = nearest(found, published)
    fitting = [one for one in found if one.fits[-1]] or list(found)
    calmest = min(fitting, key=lambda one: one.outcomes[-1].variation / one.outcomes[-1].baseline_variation)
    return near if calmest in near else [*near, calmest]


def has_published_gains(one: Simulation, published: Sequence[Target]) -> bool:
    """Return whether gains are within 3 points of the published ones at every number of nodes, in jobs that fit."""
    return all(one.fits) and distance(published, one.outcomes) <= NEAR


def is_as_calm(one: Simulation, published: Sequence[Target]) -> bool:
    """Return whether the variation on the most nodes falls at least half as much as the published one."""
    found, target = one.outcomes[-1], published[-1]
    fall, published_fall = 1 - found.variation / found.baseline_variation, 1 - target.paced_variation / target.variation
    return one.fits[-1] and fall >= published_fall / 2


def strengths_needed(found: Sequence[Simulation], target: Target) -> list[tuple[Simulation, float]]:
    """Return for each coupling the lowest strength that reaches the gain on the most nodes, if any tried strength does.

    Gains between two strengths are interpolated linearly.

    Args:
        found: simulations of ascending strengths.
        target: the row with the most nodes.

    Returns:
        The simulation with the largest strength that does not reach the gain yet, and the strength.
    """
    needed = []
    for coupling, strengths in STRENGTHS.items():
        reached = []
        for cause, policy in dict.fromkeys((one.scene.cause, one.policy) for one in found):
            series = [
                one for one in found if (one.scene.coupling, one.scene.cause, one.policy) == (coupling, cause, policy)
            ]
            gains = np.array([one.outcomes[-1].gain if one.fits[-1] else -np.inf for one in series])
            above = np.flatnonzero(gains >= target.gain)
            if len(above) and above[0] > 0 and np.isfinite(gains[above[0] - 1]):
                last = int(above[0])
                share = (target.gain - gains[last - 1]) / (gains[last] - gains[last - 1])
                strength = strengths[last - 1] + share * (strengths[last] - strengths[last - 1])
                reached.append((series[last - 1], float(strength)))
        needed += [min(reached, key=lambda pair: pair[1])] if reached else []
    return needed


@dataclass(frozen=True, kw_only=True)
class PacedRun:
    """The last attempt of one run.

    Attributes:
        name: of its folder.
        nodes, num_ranks: of its ranks with a trace.
        policy: the policy it was started with; `none` for a baseline.
        samples_per_s: throughput after the warm-up, with its interval over steps; None if no samples were credited.
        variation: of the step time, with its interval over steps.
        sentence: result of the trial from trial.json; empty without a trial.
    """

    name: str
    nodes: int
    num_ranks: int
    policy: str
    samples_per_s: Estimate | None
    variation: Estimate
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PacingRow:
    """All runs of one policy on one number of nodes.

    Attributes:
        nodes, policy: common to the runs.
        num_runs: repetitions.
        samples_per_s, variation: means over repetitions with Student's interval; of a single run, over its steps.
        gain: throughput over that of the baseline on as many nodes, less 1; the interval is that of the ratio of two
            means (delta method, runs independent). None without both.
        sentences: of the runs' trials, each once.
    """

    nodes: int
    policy: str
    num_runs: int
    samples_per_s: Estimate | None
    variation: Estimate
    gain: Estimate | None
    sentences: tuple[str, ...]


def read_paced_run(run: RunDirectory) -> PacedRun:
    """Return the figures of a run.

    Raises:
        TraceError: no trace of it can be read.
        CannotTell: no step after the warm-up is common to all ranks.
    """
    attempt = run.last_attempt()
    traces = read_attempt(attempt, tables=TABLES_USED).traces
    measured = measure(traces, Selection())
    times_ns = measured.times_ns.astype(np.float64)
    has_samples = bool(measured.chosen.samples.any()) and times_ns.sum() > 0
    trial = read_json(attempt, attempt.trial_json.name, json_object, []) or {}
    record = read_json(attempt, attempt.run_json.name, json_object, []) or {}
    return PacedRun(
        name=run.path.resolve().name,
        nodes=len({trace.header.node for trace in traces}),
        num_ranks=len(traces),
        policy=_policy(record, trial),
        samples_per_s=throughput_of_steps(times_ns, measured.chosen.samples) if has_samples else None,
        variation=variation_of_steps(times_ns),
        sentence=str(trial.get("sentence", "")),
    )


def pacing_rows(runs: Sequence[PacedRun]) -> list[PacingRow]:
    """Return rows by number of nodes, the baseline first, then policies in the order of their runs."""
    kinds = dict.fromkeys((run.nodes, run.policy) for run in runs)
    policies = list(dict.fromkeys([NO_POLICY, *(policy for _, policy in kinds)]))
    baselines = {nodes: _throughput(runs, nodes, NO_POLICY) for nodes, _ in kinds}
    rows = []
    for nodes, policy in sorted(kinds, key=lambda kind: (kind[0], policies.index(kind[1]))):
        of_kind = [run for run in runs if (run.nodes, run.policy) == (nodes, policy)]
        speed, baseline = _throughput(runs, nodes, policy), baselines[nodes]
        is_comparable = policy != NO_POLICY and speed is not None and baseline is not None
        rows.append(
            PacingRow(
                nodes=nodes,
                policy=policy,
                num_runs=len(of_kind),
                samples_per_s=speed,
                variation=_over_runs([run.variation for run in of_kind]),
                gain=ratio_less_one(speed, baseline) if is_comparable and speed and baseline else None,
                sentences=tuple(dict.fromkeys(run.sentence for run in of_kind if run.sentence)),
            )
        )
    return rows


def ratio_less_one(above: Estimate, below: Estimate) -> Estimate:
    """Return the ratio of two independent estimates minus 1; relative half-widths add as squares (delta method)."""
    value = above.value / below.value
    relative = [(found.high - found.low) / 2 / found.value for found in (above, below)]
    half = value * float(np.hypot(relative[0], relative[1]))
    return Estimate(value=value - 1, low=value - 1 - half, high=value - 1 + half)


def pacing_values(row: PacingRow, published: Sequence[Target]) -> list[Any]:
    """Return a row of the table: a value for each of `PACING_COLUMNS`, None where it is not known or published."""
    theirs = next((target for target in published if target.nodes == row.nodes), None)
    values: list[Any] = [row.nodes, row.policy, row.num_runs]
    for found in (row.samples_per_s, row.variation, row.gain):
        ends = (None, None, None) if found is None else (found.value, found.low, found.high)
        values += [end if end is not None and np.isfinite(end) else None for end in ends]
    if theirs is None:
        return [*values, None, None]
    is_baseline = row.policy == NO_POLICY
    variation = theirs.variation if is_baseline else theirs.paced_variation
    return [*values, None if is_baseline else theirs.gain, variation]


def interval_text(found: Estimate | None, of: Callable[[float], str]) -> str:
    """Return an estimate as text, and on a second line its interval where that is known; empty if it is not known."""
    if found is None:
        return ""
    return of(found.value) + (f"\n{of(found.low)} to {of(found.high)}" if np.isfinite(found.low) else "")


def read_published_pacing(path: Path) -> list[Target]:
    """Return the published table, by number of nodes.

    Raises:
        DataError: the file is missing, or has other columns.
    """
    found: dict[int, dict[str, tuple[float, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                values = float(row["baseline"]), float(row["coordination"])
                found.setdefault(int(row["nodes"]), {})[row["metric"]] = values
        return [_target(nodes, metrics) for nodes, metrics in sorted(found.items())]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} does not have the published values ({error}): restore it from the repository"
        ) from error


def _target(nodes: int, metrics: dict[str, tuple[float, float]]) -> Target:
    speed, variation = metrics["throughput_samples_per_s"], metrics["cv_iteration_time"]
    return Target(
        nodes=nodes,
        samples_per_s=speed[0],
        variation=variation[0],
        paced_samples_per_s=speed[1],
        paced_variation=variation[1],
    )


def _throughput(runs: Sequence[PacedRun], nodes: int, policy: str) -> Estimate | None:
    known = [run.samples_per_s for run in runs if (run.nodes, run.policy) == (nodes, policy) and run.samples_per_s]
    return _over_runs(known) if known else None


def _over_runs(found: Sequence[Estimate]) -> Estimate:
    return found[0] if len(found) == 1 else mean_of([one.value for one in found])


def _policy(record: dict[str, Any], trial: dict[str, Any]) -> str:
    """Return the policy that a run was started with; `none` for runs that predate policies."""
    try:
        return str(record["config"]["pace"]["policy"])
    except (KeyError, TypeError):
        return str(trial.get("policy", NO_POLICY))
