"""`python -m hpcpace.studies`: what the study scripts of sbatch/ call to plan, to run and to look at a study."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from hpcpace.errors import HpcpaceError
from hpcpace.studies.folder import OPEN, StudyFolder
from hpcpace.studies.scaling import FAULTS, OF_LAB, PLACEMENTS, ScalingFolder, scaling_runs
from hpcpace.studies.scaling import verdicts as verdicts_of
from hpcpace.studies.setups import (
    NANO_CLUSTER_LAYOUTS,
    NanoCluster,
    model_size_setups,
    parse_layout,
    repeated,
)
from hpcpace.units import format_count

_STUDY = click.argument("study", type=click.Path(path_type=Path))
_DEFAULT = NanoCluster()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Plan a study, do its runs, see how far it is."""


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise click.BadParameter(f"{text!r}: give whole numbers with commas between") from None
    if any(number < 1 for number in numbers):
        raise click.BadParameter(f"{text!r}: give numbers of at least 1")
    return numbers


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@command.command()
@_STUDY
@click.option("--preset", default=_DEFAULT.preset, show_default=True, help="Size of gpt2.")
@click.option("--batches", default=_joined(_DEFAULT.batches), show_default=True, help="Sequences of a replica.")
@click.option(
    "--image-batches",
    default=_joined(_DEFAULT.image_batches),
    show_default=True,
    help="Images of a replica of resnet18; empty for no resnet18.",
)
@click.option("--layouts", default=",".join(map(str, NANO_CLUSTER_LAYOUTS)), show_default=True, help="SERVERSxRANKS.")
@click.option("--repetitions", type=click.IntRange(1), default=_DEFAULT.repetitions, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=_DEFAULT.steps, show_default=True, help="Steps that count.")
@click.option("--warmup-steps", type=click.IntRange(0), default=_DEFAULT.warmup_steps, show_default=True)
@click.option("--shrink", type=click.IntRange(1), default=1, show_default=True, help="Divide gpt2's widths by this.")
@click.option("--image-shrink", type=click.IntRange(1), default=1, show_default=True, help="The same of resnet18.")
@click.option(
    "--image-batch-divisor", type=click.IntRange(1), default=1, show_default=True, help="Divide image batches by this."
)
def nano_cluster(study: Path, batches: str, image_batches: str, layouts: str, **values: Any) -> None:
    """Write the plan of the nano-cluster study, unless STUDY has one."""
    sweep = NanoCluster(
        batches=_numbers(batches),
        image_batches=_numbers(image_batches),
        layouts=tuple(map(parse_layout, layouts.split(","))),
        image_steps=values["steps"],
        **values,
    )
    _write(study, "nano-cluster", repeated(sweep.setups(), sweep.repetitions))


@command.command()
@_STUDY
@click.option("--batch", type=click.IntRange(1), default=16, show_default=True, help="Sequences of a step.")
@click.option("--repetitions", type=click.IntRange(1), default=_DEFAULT.repetitions, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=_DEFAULT.steps, show_default=True, help="Steps that count.")
@click.option("--warmup-steps", type=click.IntRange(0), default=_DEFAULT.warmup_steps, show_default=True)
@click.option("--shrink", type=click.IntRange(1), default=1, show_default=True, help="Divide all widths by this.")
def model_size(study: Path, repetitions: int, **values: Any) -> None:
    """Write the plan of the model-size study, unless STUDY has one."""
    _write(study, "model-size", repeated(model_size_setups(**values), repetitions))


def _write(path: Path, name: str, runs: list[Any]) -> None:
    study = StudyFolder(path)
    is_new = study.write_plan(name, runs)
    num_runs = len(study.runs())
    click.echo(f"{study.plan_json}: {num_runs} runs{'' if is_new else ', as they were planned before'}", err=True)


@command.command()
@_STUDY
def layouts(study: Path) -> None:
    """Print the layouts that have open runs, each with its servers and ranks on each."""
    found = dict.fromkeys(run.setup.layout for run in StudyFolder(study).open_runs())
    for layout in sorted(found):
        click.echo(f"{layout} {layout.servers} {layout.ranks_per_server}")


@command.command()
@_STUDY
@click.option("--layout", metavar="SERVERSxRANKS", help="Only of this layout.")
def left(study: Path, layout: str | None) -> None:
    """Print how many runs are open."""
    click.echo(len(StudyFolder(study).open_runs(parse_layout(layout) if layout else None)))


@command.command()
@_STUDY
def status(study: Path) -> None:
    """Print how many runs of each set-up are done, one line."""
    folder = StudyFolder(study)
    states = [folder.state(run) for run in folder.runs()]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != OPEN]
    click.echo(
        f"{len(states) - states.count(OPEN)} of {len(states)} runs done" + (f": {', '.join(parts)}" * bool(parts))
    )


@command.command()
@_STUDY
@click.option("--layout", metavar="SERVERSxRANKS", required=True, help="That of this job.")
def series(study: Path, layout: str) -> None:
    """Do all open runs of a layout; srun or mpiexec starts this, once a rank."""
    from hpcpace.studies.series import run_series

    sys.exit(run_series(StudyFolder(study), parse_layout(layout)))


@command.command()
@_STUDY
@click.option("--nodes", default="1,2,4", show_default=True, help="Numbers of nodes.")
@click.option("--ranks-per-node", type=click.IntRange(1), default=2, show_default=True)
@click.option("--oversubscriptions", default="1", show_default=True, help="Of uplinks; several in a lab only.")
@click.option("--placements", default=",".join(PLACEMENTS), show_default=True, help="Of ranks over nodes.")
@click.option("--steps", type=click.IntRange(20), default=120, show_default=True, help="Steps of a run.")
@click.option("--step-ms", type=click.IntRange(10), default=150, show_default=True, help="What a rank computes, about.")
@click.option("--emulate", "is_emulated", is_flag=True, help="Let every rank sleep that long in each step.")
@click.option("--faults", "has_faults", is_flag=True, help="Also a run with each failure mode.")
def scaling(study: Path, nodes: str, oversubscriptions: str, placements: str, has_faults: bool, **values: Any) -> None:
    """Write the plan of the scaling study, or add to that of STUDY."""
    runs = scaling_runs(
        nodes=_numbers(nodes),
        oversubscriptions=_numbers(oversubscriptions),
        placements=placements.split(","),
        faults=tuple(FAULTS) if has_faults else (),
        **values,
    )
    folder = ScalingFolder(study)
    folder.write_plan(runs)
    click.echo(f"{folder.plan_json}: {len(folder.runs())} runs, {len(folder.open_runs())} to do", err=True)


@command.command()
@_STUDY
@click.option("--no-lab", is_flag=True, help="Leave out what only a lab can do.")
def scaling_jobs(study: Path, no_lab: bool) -> None:
    """Print the open runs, a line each: name, nodes, ranks a node, placement, then the options of the training."""
    for run in ScalingFolder(study).open_runs():
        if no_lab and run.fault in OF_LAB:
            click.echo(f"{run.name}: left out, only a lab can inject it", err=True)
            continue
        words = [run.name, str(run.nodes), str(run.ranks_per_node), run.placement, *run.training()]
        click.echo(" ".join(words))


@command.command()
@_STUDY
@click.argument("name")
def scaling_network(study: Path, name: str) -> None:
    """Print the faults of a lab that make its network that of a run; the lab's status as JSON is read from stdin."""
    for words in ScalingFolder(study).run_named(name).lab_faults(json.load(sys.stdin)):
        click.echo(" ".join(words))


@command.command()
@_STUDY
def verdicts(study: Path) -> None:
    """Print what the reports of a scaling study say, beside what was injected."""
    from hpcpace.plots.files import console_for_tables
    from hpcpace.quoting import printable
    from hpcpace.report.terminal.layout import table

    console = console_for_tables()
    shown = table("run", ["tokens/s", "a node,\nrelative", "step", "CV", "report says", "right"])
    for found in verdicts_of(ScalingFolder(study)):
        shown.add_row(
            found.run.name,
            "" if found.samples_per_s is None else format_count(found.samples_per_s),
            "" if found.efficiency is None else f"{found.efficiency:.2f}",
            "" if found.step_ms is None else f"{found.step_ms:.4g} ms",
            "" if found.cv is None else f"{found.cv:.2f}",
            printable(found.mode),
            {None: "", True: "yes", False: "NO"}[found.is_found],
        )
    console.print(shown)


def main() -> None:
    """Run the command; an error of hpcpace is one line and its exit code."""
    try:
        command()
    except HpcpaceError as error:
        print(f"hpcpace: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
