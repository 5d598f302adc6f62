"""`hpcpace plan`: predict what other layouts and machines would cost a training, from a run or a description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    PATH,
    Real,
    Whole,
    headed,
    memory,
    numbers,
    opened_run,
    option,
    show,
    verbose,
    warn,
    write_target,
)
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.rundir import check_target
from hpcpace.core.text import parse_rate, printable
from hpcpace.planning import CHANGES

if TYPE_CHECKING:
    from hpcpace.planning.answer import Question
    from hpcpace.planning.machine import KnownMachine
    from hpcpace.planning.model import Transformer
    from hpcpace.planning.of_run import PlannedRun
    from hpcpace.report.plan_report import Present

_COLUMNS = ("dp", "pp", "tp", "zero", "micro_batch", "recompute")
_BOUNDS = {"zero": (0, 3), "recompute": (0, 2)}
_LEAST, _MOST = 1, 1 << 24
_DTYPES = {"bfloat16": 2, "float32": 4}


def _restrictions(_: click.Context, __: click.Parameter, given: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Read restrictions such as `tp=1,2`."""
    found: dict[str, tuple[int, ...]] = {}
    for text in given:
        name, values = text.split("=", 1) if "=" in text else (text, "")
        parts = values.split(",")
        if name not in _COLUMNS or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            raise click.BadParameter(
                f"{printable(text)!r}: write a column and its values, like tp=1,2; columns: {', '.join(_COLUMNS)}"
            )
        least, most = _BOUNDS.get(name, (_LEAST, _MOST))
        values_of = sorted({int(part) for part in parts})
        if name in found or not least <= values_of[0] <= values_of[-1] <= most:
            raise click.BadParameter(f"{printable(text)!r}: name {name} once, with values from {least} to {most}")
        found[name] = tuple(values_of)
    return found


def _kinds(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Read kinds of changes such as `network,nodes`; an option that is not given has none."""
    found = tuple(text.split(",")) if text else ()
    if unknown := [kind for kind in found if kind not in CHANGES]:
        raise click.BadParameter(f"{printable(unknown[0])!r}: choose from {', '.join(CHANGES)}")
    return found


@click.command(cls=Command)
@click.argument("run", type=PATH, required=False)
@headed(
    "What to plan",
    option(
        "--model",
        metavar="NAME",
        help="Take this model: gpt2-small, -medium, -large, -xl, or a file of TOML or YAML.",
        show_default="that of the run",
    ),
    option(
        "--machine",
        metavar="NAME",
        help="Take this machine: a100, h100, a40, or a file of TOML or YAML.",
        show_default="that of the run",
    ),
    option("--probe", type=PATH, metavar="FILE", help="Take rates of links from this probe.", show_default="none"),
    option(
        "--network", metavar="RATE", help="Let each node send at this rate, like 100gbit.", show_default="as measured"
    ),
    option(
        "--nics",
        type=Whole(1, 64),
        metavar="N",
        help="Give each node this many network adapters, each as fast as its network is without this option.",
        show_default="as measured",
    ),
    option(
        "--oversubscription",
        type=Real(1),
        default=1.0,
        metavar="X",
        help="Let nodes below a leaf switch send X times what its uplinks carry.",
    ),
    option(
        "--leaf-nodes",
        type=Whole(1),
        default=1,
        metavar="N",
        help="Place this many neighbouring nodes below each leaf switch; with 1, what leaves a node crosses uplinks.",
    ),
    option(
        "--gpu-memory",
        type=Real(0, is_open=True),
        metavar="GB",
        help="Let each rank have as much memory.",
        show_default="that of the machine",
    ),
    option("--attempt", "attempt_number", type=Whole(0), help="Read this attempt.", show_default="the last one"),
    memory,
)
@headed(
    "Layouts",
    option(
        "--nodes",
        callback=numbers,
        metavar="N,N",
        help="Look at these numbers of nodes.",
        show_default="1,2,4,8 times those of the run",
    ),
    option("--batch", type=Whole(1), help="Train as many sequences in a step.", show_default="that of the run, or 512"),
    option(
        "--dtype",
        type=click.Choice([*_DTYPES]),
        help="Compute in this type.",
        show_default="that of the run, or bfloat16",
    ),
    option(
        "--only",
        multiple=True,
        callback=_restrictions,
        metavar="NAME=N,N",
        help="Look only at layouts with these values of dp, pp, tp, zero, micro_batch or recompute (0 none, 1 part, "
        "2 all).",
        show_default="all",
    ),
    option(
        "--what",
        callback=_kinds,
        metavar="KIND,KIND",
        help=f"Say what these changes would do: {', '.join(CHANGES)}.",
        show_default="all, and show those that help",
    ),
    option("--top", type=Whole(1, 1000), default=8, help="Show as many layouts for each number of nodes."),
)
@headed(
    "Output",
    option(
        "--price",
        type=Real(0),
        help="Say what a billion tokens cost at this price of an hour of a GPU.",
        show_default="none",
    ),
    option(
        "--write",
        "job_script",
        type=PATH,
        metavar="FILE",
        help="Write a job script of the best layout into this file.",
        show_default="none",
    ),
    option("--html", type=PATH, metavar="FILE", help="Write a page with time against cost.", show_default="none"),
    option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    verbose,
)
def command(
    run: Path | None,
    model: str | None,
    machine: str | None,
    attempt_number: int | None,
    memory: str | None,
    nodes: tuple[int, ...],
    batch: int | None,
    dtype: str | None,
    only: Mapping[str, tuple[int, ...]],
    what: tuple[str, ...],
    top: int,
    price: float | None,
    job_script: Path | None,
    html: Path | None,
    as_json: bool,
    is_verbose: bool,
    **links: Any,
) -> None:
    """Predict step time, memory and network volume of layouts and numbers of nodes, before a job runs.

    Either from a traced RUN, whose computation and links are measured, or from --model and --machine alone. `hpcpace
    help plan` says what predictions rest on and how far off they were.

    Exit codes: 0 fine; 2 bad input; 3 it cannot tell: nothing fits, or the run does not show what its steps cost.
    """
    check_target(job_script, [run, links["probe"]], "--write")
    check_target(html, [run, links["probe"], job_script], "--html")
    if html is not None and job_script is not None and html.absolute() == job_script.absolute():
        raise UsageError(f"--write and --html both name {html}: give each a file")
    if run is None and (model is None or machine is None):
        raise UsageError("name a run, or both --model and --machine")

    from hpcpace.planning.answer import answer, check_growth
    from hpcpace.planning.files import read_machine, read_model
    from hpcpace.report.html import html_page
    from hpcpace.report.plan_report import Prices, job_script_of, plan_document
    from hpcpace.report.plan_report import as_json as json_of

    named_model = None if model is None else read_model(model)
    measured = None
    if run is not None:
        measured = _measured(run, attempt_number, memory, named_model, is_verbose=is_verbose)
    known = measured.known if measured is not None and machine is None else read_machine(str(machine))
    if not (measured is None or measured.has_network or machine or links["network"] or links["probe"]):
        nodes = _one_node(nodes)
    known = _changed(known, **links)
    known = _with_dtype(known, dtype, measured, is_moved=machine is not None)
    question = _question(
        measured, known, named_model, is_moved=machine is not None, nodes=nodes, batch=batch, dtype=dtype, only=only
    )
    if measured is not None and not machine:
        check_growth(question, measured.nodes)
    plan = answer(replace(question, what=what or CHANGES), top=top)
    remarks = (*plan.left_out, *known.remarks)
    prices = Prices(
        per_gpu_hour=price,
        unit="samples" if question.job.model.sequence == 1 else "tokens",
        processor="GPU" if known.machine.has_gpus else "rank",
    )
    _write(job_script, job_script_of(plan, question.job, prices.unit), "--write")
    present = None if measured is None else _present(measured)
    names = {"model": question.job.model.name, "machine": known.machine.name}
    document = plan_document(plan, **names, remarks=remarks, prices=prices, present=present, all_changes=bool(what))
    _write(html, html_page(document) if html is not None else "", "--html")
    data = json.dumps(json_of(plan, remarks=remarks, prices=prices), indent=2)
    show(document, f"{data}\n", as_json=as_json, is_verbose=is_verbose)
    for written in filter(None, () if as_json else (job_script, html)):
        click.echo(f"written: {printable(str(written))}")


def _with_dtype(known: KnownMachine, dtype: str | None, measured: PlannedRun | None, *, is_moved: bool) -> KnownMachine:
    """Return a machine whose predictions have no interval if nothing was measured in the type that is planned."""
    of_run = 2 if measured is None else int(measured.layout.element_bytes[0])
    planned, computed = of_run if dtype is None else _DTYPES[dtype], 2 if is_moved else of_run
    if planned == computed:
        return known
    what = "the steps of its constants" if measured is None or is_moved else "the run"
    unmeasured = f"{what} had elements of {computed} bytes: how fast ranks compute with {planned} was not measured"
    return replace(known, error=None, remarks=(unmeasured, *known.remarks))


def _write(target: Path | None, content: str, name: str) -> None:
    if target is not None:
        write_target(target, content, name)


def _present(measured: PlannedRun) -> Present:
    from hpcpace.report.plan_report import Present

    samples = measured.batch * measured.job.model.sequence
    return Present(layout=measured.layout.row(0), samples_per_s=samples / measured.step_s)


def _one_node(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the nodes to look at where nothing is known of the network.

    Raises:
        CannotTell: more than one was asked for.
    """
    if max(nodes, default=1) > 1:
        raise CannotTell(
            "the run does not show how fast nodes send to each other: name the network with --network or --probe"
        )
    return (1,)


def _measured(
    run: Path,
    number: int | None,
    memory: str | None,
    model: Transformer | None,
    *,
    is_verbose: bool,
) -> PlannedRun:
    from hpcpace.planning.of_run import measure_run

    with opened_run(run, number, memory=memory) as opened:
        found = measure_run(opened, model)
    warn(opened.problems, is_verbose=is_verbose)
    return found


def _changed(
    known: KnownMachine,
    *,
    probe: Path | None,
    network: str | None,
    nics: int | None,
    oversubscription: float,
    leaf_nodes: int,
    gpu_memory: float | None,
) -> KnownMachine:
    """Return a machine with what options say of it.

    Raises:
        UsageError: a rate cannot be read, or leaves are named without their uplinks.
        ProbeError: the probe cannot be read.
    """
    from hpcpace.planning.machine import with_links
    from hpcpace.probe.record import read_probe

    if probe is not None:
        known = with_links(known, read_probe(probe))
    machine = known.machine
    if network is not None:
        try:
            machine = replace(machine, network_rate=parse_rate(network) / 8, is_of_rings=False)
        except ValueError as error:
            raise UsageError(f"--network: {error}") from None
    if gpu_memory is not None:
        machine = replace(machine, memory_bytes=gpu_memory * 1e9)
    known = replace(known, machine=machine)
    if nics is not None:
        machine = replace(machine, network_rate=machine.network_rate * nics, num_nics=nics)
        known = known.unmeasured(machine, f"that {nics} adapters carry {nics} times as much, a rank through each,")
    if leaf_nodes > 1 and oversubscription == 1:
        raise UsageError("--leaf-nodes matters where uplinks are narrow: say by how much with --oversubscription")
    if oversubscription > 1:
        machine = replace(known.machine, oversubscription=oversubscription, leaf_nodes=leaf_nodes)
        known = known.unmeasured(machine, "how data share uplinks")
    return known


def _question(
    measured: PlannedRun | None,
    known: KnownMachine,
    model: Transformer | None,
    *,
    is_moved: bool,
    nodes: tuple[int, ...],
    batch: int | None,
    dtype: str | None,
    only: Mapping[str, tuple[int, ...]],
) -> Question:
    """Return what is asked.

    Args:
        measured: the run that constants come from, if any.
        known: the machine.
        model: that was named; it is without a run.
        is_moved: whether the machine is another one than that of the run.
        nodes, batch, dtype, only: as options; nothing for those of the run.

    Raises:
        UsageError: a script cannot be moved to another machine.
    """
    from hpcpace.planning.answer import MAX_GROWTH, Question
    from hpcpace.planning.engine import Job
    from hpcpace.planning.files import MEASURED_RANKS
    from hpcpace.planning.model import PRESETS, MeasuredModel

    first = 1 if measured is None else measured.nodes
    if measured is None:
        assert model is not None
        # Reference workloads keep parameters and gradients in float32.
        job = Job(model=model, machine=known.machine, gradient_bytes=4 if model.name in PRESETS else 0)
        size, element_bytes = 512, 2
    else:
        if is_moved and isinstance(measured.job.model, MeasuredModel):
            raise UsageError("the run shows how long its model takes on its own machine alone: name --model, too")
        job, size = measured.job.on(known.machine), measured.batch
        element_bytes = int(measured.layout.element_bytes[0])
    question = Question(
        job=job,
        nodes=sorted(set(nodes)) or [first * times for times in (1, 2, 4, 8)],
        batch=batch or size,
        only={**only, "element_bytes": (element_bytes if dtype is None else _DTYPES[dtype],)},
        error=known.error,
    )
    if measured is None or is_moved:
        return replace(question, max_ranks=MAX_GROWTH * MEASURED_RANKS)
    layout = measured.layout.row(0)
    return replace(question, correction=measured.correction, measured=layout, spread=measured.spread)
