"""`hpcpace lab`: boot a real Slurm with several hosts and a shaped network on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpcpace.cli.commands import Group
from hpcpace.cli.lab_fault import fault
from hpcpace.cli.lab_inside import attach_inside, name_option
from hpcpace.cli.options import PATH, headed, option, setting
from hpcpace.config import LabConfig
from hpcpace.config_sources import load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.text import format_rate, parse_rate
from hpcpace.lab.hosts import command_on
from hpcpace.lab.lab import Lab, bring_down
from hpcpace.lab.plan import LabFiles
from hpcpace.lab.status import print_status, read_status, table_console


@click.group(cls=Group)
def command() -> None:
    """Boot a cluster on this machine: real Slurm, shaped links, faults at known times."""


@command.command()
@headed(
    "Hosts",
    setting("lab", "name", metavar="NAME", help="Name the lab; several can be up side by side."),
    setting("lab", "hosts", type=int, help="Boot this many hosts: n1, n2, ..."),
    setting(
        "lab", "cpus_per_host", type=int, help="Let each host claim this many CPUs in Slurm, whatever the machine has."
    ),
    setting(
        "lab",
        "cpu_quota",
        type=float,
        metavar="CORES",
        default="unlimited",
        help="Give each host at most this many cores' worth of processor time.",
    ),
    setting("lab", "tmp_size", metavar="SIZE", help="Give each host a /tmp of this size, in memory."),
    setting(
        "lab",
        "share",
        multiple=True,
        metavar="FOLDER",
        default="the Python in use, hpcpace, the current folder",
        help="Show this folder below /tmp to all hosts, too; may be given several times.",
    ),
    setting(
        "lab",
        "clock_step_s",
        type=int,
        help="Set the clock of n1 ahead by this many seconds, that of n2 by twice as many, ...",
    ),
)
@headed(
    "Network",
    setting(
        "lab",
        "leaves",
        type=int,
        help="Connect the hosts to this many leaf switches, in blocks, below one spine; at most as many as hosts.",
    ),
    setting(
        "lab",
        "link",
        metavar="RATE",
        help="Shape the link from each host to its leaf, in each direction, like 10gbit.",
    ),
    setting("lab", "uplink", metavar="RATE", help="Shape the link from each leaf to the spine, in each direction."),
    setting("lab", "mtu", type=int, help="Set the largest packet of all links, in bytes."),
)
@headed(
    "Settings",
    option(
        "--config",
        "config_file",
        type=PATH,
        help="Read settings from the table [lab] of this TOML file.",
        show_default="none",
    ),
)
def up(config_file: Path | None, **values: Any) -> None:
    """Boot a lab, and wait until every host takes jobs."""
    values["share"] = values["share"] or None
    config = load_config(file=config_file, environ=process_environ(), options={"lab": values}).lab
    console = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(f"lab {config.name}", total=None)
        lab = Lab.up(config, lambda what, done, total: bar.update(task, description=what, completed=done, total=total))
    boot_s = json.loads(lab.files.ready_json.read_text())["boot_s"]
    link, uplink = (format_rate(parse_rate(rate)) for rate in (config.link, config.uplink))
    click.echo(
        f"lab {config.name}: {_count(config.hosts, 'host', 'hosts')} of {_count(config.cpus_per_host, 'CPU', 'CPUs')} "
        f"on {_count(config.leaves, 'leaf', 'leaves')}, links {link}, uplinks {uplink}; up in {boot_s:.1f} s"
    )
    if lab.plan.emulation:
        click.echo(f"note: {lab.plan.emulation}")
    option = "" if config.name == LabConfig().name else f"--name {config.name} "
    click.echo(f"hpcpace lab run {option}-- sbatch -N {config.hosts} --ntasks-per-node 1 sbatch/gpt2_pp.sh")


@command.command()
@name_option
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(name: str, as_json: bool) -> None:
    """Show hosts, links with rates and bytes, jobs and faults.

    Exit code 1: a host is dead or takes no jobs, or a link is down.
    """
    lab = attach_inside(name)
    state = read_status(lab.plan, lab.files)
    if as_json:
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        print_status(table_console(), state)
    if not state.is_well:
        raise SystemExit(EXIT_WARNING)


@command.command(context_settings={"ignore_unknown_options": True})
@name_option
@option(
    "--on",
    "host",
    metavar="HOST",
    help="Run it on this host, as ssh would.",
    show_default="login, where slurmctld runs",
)
@click.argument("words", metavar="-- COMMAND", nargs=-1, required=True, type=click.UNPROCESSED)
def run(name: str, host: str | None, words: tuple[str, ...]) -> None:
    """Run a command in the lab, with its Slurm on PATH.

    The exit code is that of the command.
    """
    _become(name, host, list(words))


@command.command()
@name_option
@option("--on", "host", metavar="HOST", help="Open the shell on this host.", show_default="login, where slurmctld runs")
def shell(name: str, host: str | None) -> None:
    """Open a shell in the lab."""
    attach_inside(name)
    click.echo(f"in lab {name}{f', host {host}' if host else ''}: sbatch, srun and squeue work; exit leaves")
    _become(name, host, [process_environ().get("SHELL", "/bin/sh")])


@command.command()
@name_option
@option(
    "--truth",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the log of truth in this file.",
    show_default="removed",
)
def down(name: str, truth: Path | None) -> None:
    """Shut a lab down, and remove everything that belongs to it.

    This also cleans up after a crash or a boot that failed halfway.
    """
    if os.geteuid() != 0:
        raise UsageError(f"the lab needs root; this is user {os.geteuid()}: start it with sudo")
    existed = bring_down(name, truth=truth)
    click.echo(f"lab {name} is down" if existed else f"no lab {name} was up, and there was nothing to remove")


@command.command()
@name_option
def truth(name: str) -> None:
    """Print the log of truth, one JSON object per line.

    It has the clocks, the links, and the beginning and end of each fault.
    """
    files = LabFiles.of(name)
    if not files.truth.exists():
        Lab.attach(name)  # raises, and says why there is none
    sys.stdout.write(files.truth.read_text())


command.add_command(fault)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _become(name: str, host: str | None, words: list[str]) -> NoReturn:
    lab = attach_inside(name)
    folder = Path.cwd()
    if not lab.plan.hosts_see(folder):
        remedy = f"jobs from here fail: use another folder, or `hpcpace lab up --share {folder}`"
        if host is not None:
            raise UsageError(f"host {host} does not see {folder}, because it has its own /tmp: {remedy}")
        click.echo(f"hpcpace: warning: hosts do not see {folder}, because each has its own /tmp: {remedy}", err=True)
    if host is not None:
        words = command_on(lab.files, lab.plan.host(host), words, folder=folder)
    try:
        os.execvpe(words[0], words, lab.environ())
    except OSError as error:
        raise UsageError(f"cannot run {words[0]}: {error.strerror}") from error
