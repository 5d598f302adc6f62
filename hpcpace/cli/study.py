"""`hpcpace study`: plan a study, run it inside its jobs and show its progress.

The scripts of sbatch/ call these commands and submit the jobs; docs/scale.md is the guide.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Group
from hpcpace.cli.options import PATH, Whole, headed, numbers, option
from hpcpace.core.errors import UsageError
from hpcpace.core.text import format_count, format_duration, nanoseconds
from hpcpace.studies.jobs import (
    DEFAULT_POLICIES,
    FAULTS,
    OF_LAB,
    PLACEMENTS,
    ScalingFolder,
    pacing_jobs,
    results,
    run_series,
    scaling_runs,
)
from hpcpace.studies.setups import (
    NANO_CLUSTER_LAYOUTS,
    OPEN,
    NanoCluster,
    StudyFolder,
    model_size_setups,
    parse_layout,
    repeated,
)
from hpcpace.train.settings import PRESETS

MAX_REPETITIONS = 1000
MAX_SHRINK = 1024
MAX_RANKS = 4096
"""Ranks of one node: more than any has cores."""


def _numbers_or_none(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    return numbers(ctx, param, text) if text else ()


def _joined(of: tuple[int, ...]) -> str:
    return ",".join(map(str, of))


_STUDY = click.argument("study", type=PATH)
_DEFAULT = NanoCluster()
_REPETITIONS = option(
    "--repetitions", type=Whole(1, MAX_REPETITIONS), default=_DEFAULT.repetitions, help="Run each set-up this often."
)
_STEPS = option("--steps", type=Whole(1), default=_DEFAULT.steps, help="Measure this many steps per run.")
_WARMUP_STEPS = option(
    "--warmup-steps", type=Whole(0), default=_DEFAULT.warmup_steps, help="Run this many steps before the measured ones."
)
_SHRINK = option("--shrink", type=Whole(1, MAX_SHRINK), default=1, help="Divide the widths of gpt2 by this.")
_NODES = option("--nodes", metavar="LIST", callback=numbers, default="1,2,4", help="Run on these numbers of nodes.")


@click.group(cls=Group)
def command() -> None:
    """Plan and run a study of how training scales.

    sbatch/nano_cluster.sh, scaling_study.sh and pacing_trial.sh call these commands and submit the jobs.
    """


@command.command()
@_STUDY
@headed(
    "What to train",
    option("--preset", type=click.Choice(PRESETS), default=_DEFAULT.preset, help="Train gpt2 of this size."),
    _SHRINK,
    option(
        "--batches",
        metavar="LIST",
        callback=numbers,
        default=_joined(_DEFAULT.batches),
        help="Use these numbers of sequences per replica and step.",
    ),
    option(
        "--image-batches",
        metavar="LIST",
        callback=_numbers_or_none,
        default=_joined(_DEFAULT.image_batches),
        help="Use these numbers of images per replica and step for resnet18; empty: no resnet18.",
    ),
    option("--image-shrink", type=Whole(1, MAX_SHRINK), default=1, help="Divide the widths of resnet18 by this."),
    option("--image-batch-divisor", type=Whole(1), default=1, help="Divide the image batches by this."),
)
@headed(
    "Where and how often",
    option(
        "--layouts",
        metavar="LIST",
        default=",".join(map(str, NANO_CLUSTER_LAYOUTS)),
        help="Use these layouts, SERVERSxRANKS with the ranks of each server.",
    ),
    _REPETITIONS,
    _STEPS,
    _WARMUP_STEPS,
)
def nano_cluster(study: Path, layouts: str, **values: Any) -> None:
    """Plan the nano-cluster study in STUDY.

    A study that has a plan keeps it.
    """
    sweep = NanoCluster(layouts=tuple(map(parse_layout, layouts.split(","))), image_steps=values["steps"], **values)
    _write(study, "nano-cluster", repeated(sweep.setups(), sweep.repetitions))


@command.command()
@_STUDY
@headed(
    "What to train",
    option("--batch", type=Whole(1), default=16, help="Train on this many sequences per step."),
    _SHRINK,
)
@headed("How often", _REPETITIONS, _STEPS, _WARMUP_STEPS)
def model_size(study: Path, repetitions: int, **values: Any) -> None:
    """Plan the model-size study in STUDY.

    A study that has a plan keeps it.
    """
    _write(study, "model-size", repeated(model_size_setups(**values), repetitions))


def _write(path: Path, name: str, runs: list[Any]) -> None:
    study = StudyFolder(path)
    is_new = study.write_plan(name, runs)
    num_runs = len(study.runs())
    when = "; `hpcpace study status` says how long they take once some are done" if is_new else ", as planned before"
    click.echo(f"{study.plan_json}: {num_runs} runs{when}", err=True)


@command.command()
@_STUDY
def layouts(study: Path) -> None:
    """List the layouts with open runs.

    Each line has the layout, the servers and the ranks per server.
    """
    found = dict.fromkeys(run.setup.layout for run in StudyFolder(study).open_runs())
    for layout in sorted(found):
        click.echo(f"{layout} {layout.servers} {layout.ranks_per_server}")


@command.command()
@_STUDY
@option("--layout", metavar="SERVERSxRANKS", help="Count only the runs of this layout.", show_default="all layouts")
def left(study: Path, layout: str | None) -> None:
    """Print the number of open runs."""
    click.echo(len(StudyFolder(study).open_runs(parse_layout(layout) if layout else None)))


@command.command()
@_STUDY
def status(study: Path) -> None:
    """Say how many runs are done, and how long the others take.

    The time of a run is the mean of those that are done, without the start of their jobs.
    """
    folder = StudyFolder(study)
    states = [folder.state(run) for run in folder.runs()]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != OPEN]
    done = f"{len(states) - states.count(OPEN)} of {len(states)} runs done" + (f": {', '.join(parts)}" * bool(parts))
    left_s = folder.left_s()
    click.echo(done + (f"; about {format_duration(nanoseconds(left_s))} left" if left_s and left_s > 1 else ""))


@command.command()
@_STUDY
@option("--layout", metavar="SERVERSxRANKS", required=True, help="Run the set-ups of this layout.")
def series(study: Path, layout: str) -> None:
    """Run all open runs of one layout.

    Start it with srun or mpiexec, once per rank.
    """
    sys.exit(run_series(StudyFolder(study), parse_layout(layout)))


@command.command()
@_STUDY
@headed(
    "Nodes and network",
    _NODES,
    option("--ranks-per-node", type=Whole(1, MAX_RANKS), default=2, help="Start this many ranks on each node."),
    option(
        "--placements",
        metavar="LIST",
        default=",".join(PLACEMENTS),
        help="Place ranks like this: block fills one node after the other, cyclic deals ranks out.",
    ),
    option(
        "--oversubscriptions",
        metavar="LIST",
        callback=numbers,
        default="1",
        help="Oversubscribe the uplinks by these factors; several values need a lab.",
    ),
)
@headed(
    "What to run",
    option("--steps", type=Whole(20), default=120, help="Run this many steps."),
    option("--step-ms", type=Whole(10, 3_600_000), default=150, help="Compute for about this long per rank and step."),
    option("--emulate", "is_emulated", is_flag=True, help="Make every rank sleep --step-ms in each step."),
    option("--faults", "has_faults", is_flag=True, help="Add a run for each failure mode."),
)
def scaling(study: Path, placements: str, has_faults: bool, **values: Any) -> None:
    """Plan the scaling study in STUDY, or add to its plan."""
    runs = scaling_runs(placements=placements.split(","), faults=tuple(FAULTS) if has_faults else (), **values)
    folder = ScalingFolder(study)
    folder.write_plan(runs)
    click.echo(f"{folder.plan_json}: {len(folder.runs())} runs, {len(folder.open_runs())} to do", err=True)


@command.command()
@_STUDY
@option("--no-lab", is_flag=True, help="Leave out runs that need a lab.")
def scaling_jobs(study: Path, no_lab: bool) -> None:
    """List the open runs of a scaling study.

    Each line has the name, the nodes, the ranks per node, the placement and the training options.
    """
    for run in ScalingFolder(study).open_runs():
        if no_lab and run.fault in OF_LAB:
            click.echo(f"{run.name}: left out: only a lab can inject its fault", err=True)
            continue
        words = [run.name, str(run.nodes), str(run.ranks_per_node), run.placement, *run.training()]
        click.echo(" ".join(words))


@command.command()
@_STUDY
@click.argument("name")
def scaling_network(study: Path, name: str) -> None:
    """List the lab faults that make the network of a run.

    NAME is the run. Reads the output of `hpcpace lab status --json` from stdin.
    """
    run = ScalingFolder(study).run_named(name)
    try:
        faults = run.lab_faults(json.load(sys.stdin))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"stdin is not the output of `hpcpace lab status --json` ({error}): boot a lab and pipe its status here"
        ) from error
    for words in faults:
        click.echo(" ".join(words))


@command.command()
@_STUDY
def verdicts(study: Path) -> None:
    """Compare reports of a scaling study with its faults.

    The table shows what each report says next to what was injected.
    """
    from hpcpace.core.text import printable
    from hpcpace.report.terminal import console_for_tables, table

    folder = ScalingFolder(study)
    found = results(folder)
    if not found:
        click.echo(f"{folder.plan_json}: none of the {len(folder.runs())} runs is done yet")
        return
    console = console_for_tables()
    shown = table("run", ["tokens/s", "per node,\nrelative", "step", "CV", "report says", "right"])
    for result in found:
        shown.add_row(
            result.run.name,
            "" if result.samples_per_s is None else format_count(result.samples_per_s),
            "" if result.efficiency is None else f"{result.efficiency:.2f}",
            "" if result.step_ms is None else f"{result.step_ms:.4g} ms",
            "" if result.cv is None else f"{result.cv:.2f}",
            printable(result.mode),
            {None: "", True: "yes", False: "NO"}[result.is_found],
        )
    console.print(shown)


@command.command()
@_STUDY
@headed(
    "Nodes",
    _NODES,
    option("--ranks-per-node", type=Whole(1, MAX_RANKS), default=4, help="Start this many ranks on each node."),
)
@headed(
    "What to run",
    option(
        "--policies",
        default=",".join(DEFAULT_POLICIES),
        metavar="LIST",
        help="Compare these policies (hpcpace help pacing); none is the baseline.",
    ),
    option(
        "--repetitions",
        type=Whole(1, MAX_REPETITIONS),
        default=3,
        help="Run each policy this often on each number of nodes.",
    ),
    option("--steps", type=Whole(1), default=400, help="Run this many steps."),
    option(
        "--with-trial",
        is_flag=True,
        help="Try each policy inside its job and drop it unless it pays; otherwise only auto and coschedule are tried.",
    ),
)
def pacing(study: Path, policies: str, **values: Any) -> None:
    """List the runs of a pacing study.

    Each line has the state, the name, the nodes, the ranks per node, the policy, the trial and the training options.
    """
    for job in pacing_jobs(policies=policies.split(","), **values):
        state = "done" if job.is_done(study) else "open"
        trial = str(job.has_trial).lower()
        click.echo(f"{state} {job.name} {job.nodes} {job.ranks_per_node} {job.policy} {trial} --steps {job.steps}")
