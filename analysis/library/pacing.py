"""Paced runs compared, with the published table and with simulated jobs.

Throughput and variation always appear together: a lower variation alone is never a gain. Every policy runs in every
kind of simulated job with the published baseline, which shows the jobs that gain as published, and what the published
table would require.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace import plots
from hpcpace.core.codec import json_object, read_json
from hpcpace.core.config import NO_POLICY
from hpcpace.core.errors import DataError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import RunDirectory
from hpcpace.frames.run import Run
from hpcpace.metrics.resampling import Estimate
from hpcpace.pace.settings import PaceSettings
from hpcpace.report.terminal import console_for_tables, note, table, title

from . import drawing, files
from .estimates import mean_of, throughput_of_steps, variation_of_steps
from .paced_jobs import (
    CAUSES,
    RANKS_PER_NODE,
    STRENGTHS,
    PacedOutcome,
    Scene,
    Target,
    distance,
    fit,
    paced,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def read_paced_run(run: Run) -> PacedRun:
    """Return the figures of the last attempt of a run.

    Raises:
        TraceError: no trace of it can be read.
        CannotTell: no step after the warm-up is common to all ranks.
        UsageError: pandas is not installed.
    """
    attempt = RunDirectory(run.path).attempt(run.attempt)
    steps = run.steps.drop_duplicates("step")
    times_ns, samples = steps.step_time_ns.to_numpy(np.float64), steps.samples.to_numpy()
    has_samples = bool(samples.any()) and times_ns.sum() > 0
    trial = read_json(attempt, attempt.trial_json.name, json_object, []) or {}
    record = read_json(attempt, attempt.run_json.name, json_object, []) or {}
    return PacedRun(
        name=run.path.resolve().name,
        nodes=run.ranks.node.nunique(),
        num_ranks=len(run.ranks),
        policy=_policy(record, trial),
        samples_per_s=throughput_of_steps(times_ns, samples) if has_samples else None,
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


MODEL_COLUMNS = (
    *("coupling", "strength", "cause", "policy", "nodes", "gain", "variation", "baseline_variation", "is_fit"),
    *("published_gain", "published_variation"),
)
REQUIRES = {
    "none": "nothing but waiting",
    "poll stealing": f"{RANKS_PER_NODE} ranks on each core that poll while they wait (weight of a polling rank)",
    "power share": f"{RANKS_PER_NODE} ranks a node that share a power budget (boost of one that computes alone)",
    "goodput collapse": "all messages of a step on one link that loses goodput beyond 16 at once (strength)",
}
MEANING = {
    "rotating": "rare events strike another rank each time",
    "lasting": "one rank of each node always has more work, and all vary together",
}


def model_rows(found: Sequence[Simulation], published: Sequence[Target]) -> list[list[Any]]:
    """Return a row for each simulation and number of nodes, with the columns of `MODEL_COLUMNS`."""
    return [
        [
            *(one.scene.coupling, one.scene.strength, one.scene.cause, one.policy, outcome.nodes, outcome.gain),
            *(outcome.variation, outcome.baseline_variation, is_fit, target.gain, target.paced_variation),
        ]
        for one in found
        for outcome, is_fit, target in zip(one.outcomes, one.fits, published, strict=True)
    ]


def print_model(found: Sequence[Simulation], published: Sequence[Target]) -> None:
    """Print the simulations to show as a table, and what follows from all of them."""
    console = console_for_tables()
    title(
        console,
        "What the published table would require",
        "simulated; nearest gains, and the calmest job",
    )
    head = ["strength", "cause", "policy", *(f"gain at\n{target.nodes}" for target in published)]
    last = published[-1]
    rows = files.rows_from_the_top(table("coupling", [*head, f"CV at {last.nodes}\nfrom  to"]), left=(2, 3))
    gains = [f"{100 * target.gain:+.1f}" for target in published]
    rows.add_row("published", "", "", "", *gains, f"{last.variation:.2f}  {last.paced_variation:.2f}")
    for one in shown(found, published):
        values = [
            f"{100 * outcome.gain:+.1f}" + "" if fits else "no fit"
            for outcome, fits in zip(one.outcomes, one.fits, strict=True)
        ]
        end = one.outcomes[-1]
        rows.add_row(
            *(one.scene.coupling, f"{one.scene.strength:g}", one.scene.cause, one.policy, *values),
            f"{end.baseline_variation:.2f}  {end.variation:.2f}",
        )
    console.print(rows)
    for line in conclusions(found, published):
        note(console, line)


def conclusions(found: Sequence[Simulation], published: Sequence[Target]) -> list[str]:
    """Return in plain words what the published table requires."""
    lines = [f"{name}: {text}" for name, text in (REQUIRES | MEANING).items() if name != "none"]
    without = max(outcome.gain for one in found if one.scene.coupling == "none" for outcome in one.outcomes)
    lines.append(f"Without a coupling the most that any policy gains is {100 * without:+.1f} %: waiting gives nothing.")
    last = published[-1]
    for one, strength in strengths_needed(found, last):
        lines.append(
            f"The published {100 * last.gain:+.1f} % at {last.nodes} nodes: {one.scene.coupling} of about "
            f"{strength:.2g} ({one.scene.cause}, {one.policy}); at {published[0].nodes} nodes "
            f"{100 * one.outcomes[0].gain:+.1f} % or more come with it, where "
            f"{100 * published[0].gain:+.1f} % were published."
        )
    gaining = [one for one in found if has_published_gains(one, published)]
    calmer = [one for one in found if is_as_calm(one, published)]
    both = [one for one in gaining if one in calmer]
    for what, ones in (
        (f"The published gains, within {100 * NEAR:.0f} points at every number of nodes", gaining),
        (f"At least half of the published fall of the CV at {last.nodes} nodes", calmer),
        ("Both at once", both),
    ):
        kinds = dict.fromkeys(f"{one.scene.coupling} ({one.scene.cause}, {one.policy})" for one in ones)
        lines.append(f"{what}: {'; '.join(kinds) or 'in none of the simulated jobs'}.")
    if calmer and not both:
        worst = min(calmer, key=lambda one: one.outcomes[-1].gain).outcomes[-1]
        lines.append(
            f"Where the CV falls so far, throughput falls as well, by up to {-100 * worst.gain:.0f} %: delays even out "
            "the steps by making the short ones long."
        )
    lines.append(
        "The baseline itself asks for much: its events, or the surplus of its slow ranks, have to grow with the "
        "number of nodes. The paper measured no mechanism, so that none of this says what its jobs did."
    )
    return lines


def draw_model(found: Sequence[Simulation], published: Sequence[Target]) -> Figure:
    """Return a plot of the gains and variations of the simulations to show, beside the published ones."""
    figure = plots.new_figure(9.5, 5.6)
    gains, variations = figure.subplots(1, 2)
    nodes = [target.nodes for target in published]
    theirs = {
        gains: [100 * target.gain for target in published],
        variations: [target.paced_variation / target.variation for target in published],
    }
    for index, one in enumerate(shown(found, published)):
        gain = np.array([100 * outcome.gain for outcome in one.outcomes])
        share = np.array([outcome.variation / outcome.baseline_variation for outcome in one.outcomes])
        drawing.draw_curve(gains, np.array(nodes), gain, None, None, one.label, index)
        drawing.draw_curve(variations, np.array(nodes), share, None, None, one.label, index)
    for axes, values in theirs.items():
        axes.plot(nodes, values, color=plots.BLACK, linestyle="--", label="published")
    drawing.label_curves(gains, "nodes", "gain of throughput, %", nodes)
    drawing.label_curves(variations, "nodes", "CV of the step time, paced over not paced", nodes)
    for axes in (gains, variations):
        axes.get_legend().remove()
    figure.legend(*gains.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
