"""`hpcpace place`: find a better host for each rank of the next run."""

from __future__ import annotations

import json
from math import isfinite
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
from hpcpace.core.errors import UsageError
from hpcpace.core.rundir import check_target
from hpcpace.core.text import format_bytes, percent, plural, printable, rank_list, shell_word

if TYPE_CHECKING:
    from hpcpace.core.rundir import Attempt
    from hpcpace.placement.gain import StepGain
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
    option(
        "--placement",
        type=PATH,
        metavar="FILE",
        help="Take the host of each rank from this file, one on each line, and judge that instead of a search.",
        show_default="none",
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
    option(
        "--try",
        "trial",
        type=PATH,
        metavar="FOLDER",
        help="Write a job script into this folder that runs the job with both placements in turn, 3 times each, and "
        "compares them.",
        show_default="none",
    ),
    option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    verbose,
)
def command(
    run: Path,
    topology: Path | None,
    placement: Path | None,
    attempt_number: int | None,
    memory: str | None,
    kind: str,
    output: Path | None,
    trial: Path | None,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Find hosts for the ranks of RUN with fewer bytes over the uplinks of leaf switches, and then between hosts.

    Each host keeps how many ranks it has. A placement that is as good as the best one found is kept. With --placement,
    one of your own is judged. `hpcpace help placement` says how bytes are counted, and how the step time is predicted;
    `--try` measures it.

    Exit codes: 0 fine; 2 bad input; 3 the run does not show it: it hung, lacks ranks or switches, or had one host.
    """
    check_target(output, [run, topology, placement], "--output")

    from hpcpace.placement.of_run import place_run, placement_text, usage_line

    with opened_run(run, attempt_number, memory=memory, topology=topology) as opened:
        found = place_run(opened, placement)
    warn([*opened.problems, *opened.judged.placed.problems], is_verbose=is_verbose)
    if output is not None:
        write_target(output, placement_text(kind, found.after, found.names), "--output")
    script = None if trial is None else _write_trial(trial, found, opened.judged.attempt)
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
        return
    for line in _lines(found, is_given=placement is not None):
        click.echo(fitted(line))
    if script is not None:
        click.echo(
            f"written: {printable(str(script))}\nnext: check the job in it, then sbatch {shell_word(str(script))}"
        )
    if output is not None:
        click.echo(f"written: {printable(str(output))}\nuse it: {usage_line(kind, str(output))}")
    elif found.num_moved and script is None and placement is None:
        click.echo("next: --output FILE writes it for the next job, on the same hosts; --try FOLDER tries it first")


def _write_trial(folder: Path, found: Placement, attempt: Attempt) -> Path:
    """Write the files of a trial, and return its job script.

    Raises:
        CannotTell: the run cannot be tried.
        UsageError: they cannot be written.
    """
    from hpcpace.batch.launch import program_path
    from hpcpace.placement.of_run import trial_files

    folder = folder.absolute()
    files = trial_files(found, attempt, folder, program_path())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder} ({error.strerror}): name another one with --try") from error
    for name, content in files.items():
        write_target(folder / name, content, "--try")
    return folder / "trial.sh"


def _lines(found: Placement, *, is_given: bool) -> list[str]:
    before, after = found.volumes_before, found.volumes_after
    if not found.num_moved:
        kind = "the same placement" if is_given else "as good as found"
        between = format_bytes(before.host_bytes)
        return [f"{kind}: {format_bytes(before.uplink_bytes)} over uplinks and {between} between hosts a step"]
    return [
        f"bytes over uplinks: {format_bytes(before.uplink_bytes)} to {format_bytes(after.uplink_bytes)} a step",
        f"bytes between hosts: {format_bytes(before.host_bytes)} to {format_bytes(after.host_bytes)} a step",
        f"step time: {_gain_words(found.gain)}",
        f"{plural(found.num_moved, 'rank')} of {len(found.before)} would change their host",
        *_ranks_by_host(found),
    ]


def _gain_words(gain: StepGain | None) -> str:
    if gain is None:
        return "cannot tell, the traces do not show exposed transfers or the rates of links"
    share = gain.share
    ends = [f"{-100 * end:+.1f}" for end in (share.high, share.low)]
    interval = f" [{', '.join(ends)}]" if isfinite(share.low) else ", interval unknown: fewer than 8 steps"
    if gain.is_bound:
        return f"at most {percent(share.value)} shorter{interval}, a bound: rates of the links are not known"
    return f"{-100 * share.value:+.1f} %{interval} by the model"


def _ranks_by_host(found: Placement) -> list[str]:
    lines = [
        f"{printable(name)}: {rank_list((found.after == host).nonzero()[0].tolist())}"
        for host, name in enumerate(found.names[:_MAX_HOSTS])
    ]
    more = len(found.names) - _MAX_HOSTS
    return [*lines, f"and {plural(more, 'more host')}: --json lists all ranks"] if more > 0 else lines


def _gain_json(gain: StepGain) -> dict[str, Any]:
    share = gain.share
    low, high = (-end if isfinite(end) else None for end in (share.high, share.low))
    return {"change_share": -share.value, "low": low, "high": high, "is_bound": gain.is_bound}


def _as_json(found: Placement) -> dict[str, Any]:
    from hpcpace.placement.of_run import local_ranks

    before, after = found.volumes_before, found.volumes_after
    places = zip(found.after.tolist(), local_ranks(found.after).tolist(), strict=True)
    return {
        "is_kept": not found.num_moved,
        "num_moved": found.num_moved,
        "uplink_bytes_per_step": {"before": before.uplink_bytes, "after": after.uplink_bytes},
        "host_bytes_per_step": {"before": before.host_bytes, "after": after.host_bytes},
        "step_time": None if found.gain is None else _gain_json(found.gain),
        "ranks": [
            {"rank": rank, "host": found.names[host], "local_rank": local} for rank, (host, local) in enumerate(places)
        ],
    }
