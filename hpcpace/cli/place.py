"""`hpcpace place`: find a better host for each rank of the next run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    PATH,
    Whole,
    fitted,
    headed,
    memory,
    opened_run,
    option,
    verbose,
    warn,
    write_target,
)
from hpcpace.core.rundir import check_target
from hpcpace.core.text import format_bytes, percent, plural, printable, rank_list

if TYPE_CHECKING:
    from hpcpace.placement.of_run import Placement

_FORMATS = ("slurm", "openmpi", "torchrun")
_MAX_HOSTS = 8
"""Whose ranks are listed: what fits a screen."""


@click.command(cls=Command)
@click.argument("run", type=PATH)
@headed(
    "What to read",
    option(
        "--topology",
        type=PATH,
        metavar="FILE",
        help="Take the leaf switches of the hosts from this file, as `hpcpace report` does.",
        show_default="what Slurm told the job",
    ),
    option("--attempt", "attempt_number", type=Whole(0), help="Read this attempt.", show_default="the last one"),
    memory,
)
@headed(
    "Output",
    option("--format", "kind", type=click.Choice(_FORMATS), default="slurm", help="Write the file for this launcher."),
    option(
        "-o", "--output", type=PATH, metavar="FILE", help="Write the placement into this file.", show_default="none"
    ),
    option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    verbose,
)
def command(
    run: Path,
    topology: Path | None,
    attempt_number: int | None,
    memory: str | None,
    kind: str,
    output: Path | None,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Find hosts for the ranks of RUN with fewer bytes over the uplinks of leaf switches, and then between hosts.

    Each host keeps how many ranks it has. `hpcpace help placement` says how bytes are counted. A placement that is as
    good as the best one found is kept.

    Exit codes: 0 fine; 2 bad input; 3 the run does not show it: it hung, lacks ranks or switches, or had one host.
    """
    check_target(output, [run, topology], "--output")

    from hpcpace.placement.of_run import place_run, placement_text, usage_line

    with opened_run(run, attempt_number, memory=memory, topology=topology) as opened:
        found = place_run(opened)
    warn([*opened.problems, *opened.judged.placed.problems], is_verbose=is_verbose)
    if output is not None:
        write_target(output, placement_text(kind, found.after, found.names), "--output")
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
        return
    for line in _lines(found):
        click.echo(fitted(line))
    if output is not None:
        click.echo(f"written: {printable(str(output))}\nuse it: {usage_line(kind, str(output))}")
    elif found.num_moved:
        click.echo("next: --output FILE writes it for the launcher of the next job, on the same hosts")


def _lines(found: Placement) -> list[str]:
    before, after = found.volumes_before, found.volumes_after
    if not found.num_moved:
        return [
            f"as good as found: {format_bytes(before.uplink_bytes)} over uplinks and {format_bytes(before.host_bytes)} "
            "between hosts a step"
        ]
    gain = found.max_gain_share
    return [
        f"bytes over uplinks: {format_bytes(before.uplink_bytes)} to {format_bytes(after.uplink_bytes)} a step",
        f"bytes between hosts: {format_bytes(before.host_bytes)} to {format_bytes(after.host_bytes)} a step",
        "step time: cannot tell, the traces do not show exposed transfers"
        if gain is None
        else f"step time: at most {percent(gain)} shorter, by the model",
        f"{plural(found.num_moved, 'rank')} of {len(found.before)} would change their host",
        *_ranks_by_host(found),
    ]


def _ranks_by_host(found: Placement) -> list[str]:
    lines = [
        f"{printable(name)}: {rank_list((found.after == host).nonzero()[0].tolist())}"
        for host, name in enumerate(found.names[:_MAX_HOSTS])
    ]
    more = len(found.names) - _MAX_HOSTS
    return [*lines, f"and {plural(more, 'more host')}: --json lists all ranks"] if more > 0 else lines


def _as_json(found: Placement) -> dict[str, Any]:
    from hpcpace.placement.of_run import local_ranks

    before, after = found.volumes_before, found.volumes_after
    places = zip(found.after.tolist(), local_ranks(found.after).tolist(), strict=True)
    return {
        "is_kept": not found.num_moved,
        "num_moved": found.num_moved,
        "uplink_bytes_per_step": {"before": before.uplink_bytes, "after": after.uplink_bytes},
        "host_bytes_per_step": {"before": before.host_bytes, "after": after.host_bytes},
        "max_gain_share": found.max_gain_share,
        "ranks": [
            {"rank": rank, "host": found.names[host], "local_rank": local} for rank, (host, local) in enumerate(places)
        ],
    }
