"""`hpcpace lab`: a real Slurm over several hosts and a shaped network, booted on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpcpace.cli.lab_fault import fault
from hpcpace.cli.lab_inside import attach_inside, name_option
from hpcpace.config import LabConfig, load_config
from hpcpace.errors import EXIT_WARNING, UsageError
from hpcpace.lab.files import LabFiles
from hpcpace.lab.hosts import command_on
from hpcpace.lab.lab import Lab, bring_down
from hpcpace.lab.status import read_status
from hpcpace.lab.status_table import print_status, table_console
from hpcpace.units import format_rate, parse_rate
from hpcpace.world.environment import process_environ


class _InOrder(click.Group):
    """A group that lists its commands in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Boot a cluster on this machine: real Slurm, shaped links, known truth."""


@command.command()
@click.option("--name", help="What tells it from other labs.  [default: lab]")
@click.option("--hosts", type=int, help="Number of hosts.")
@click.option("--leaves", type=int, help="Number of leaf switches.")
@click.option("--link", metavar="RATE", help="Rate of each host's link, like 1gbit.")
@click.option("--uplink", metavar="RATE", help="Rate of each leaf's link to the spine.")
@click.option("--mtu", type=int, help="Largest packet in bytes.")
@click.option("--cpus-per-host", type=int, help="CPUs that each host claims in Slurm.")
@click.option("--cpu-quota", type=float, metavar="CORES", help="Processor time that each host gets at most.")
@click.option("--tmp-size", metavar="SIZE", help="Size of each host's own /tmp, in memory.")
@click.option("--clock-step-s", type=int, help="Seconds by which the clocks of two neighbours differ.")
@click.option("--share", multiple=True, metavar="FOLDER", help="Folder below /tmp that all hosts see.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with a table [lab].")
def up(config_file: Path | None, **values: Any) -> None:
    """Boot a lab and wait until every host takes jobs."""
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
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(name: str, as_json: bool) -> None:
    """Show hosts, links with rates and bytes, jobs and faults.

    Exit code 1 where a host takes no jobs or a link carries nothing.
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
@click.option("--on", "host", metavar="HOST", help="Run it on this host, as ssh would; else where slurmctld runs.")
@click.argument("words", metavar="-- COMMAND", nargs=-1, required=True, type=click.UNPROCESSED)
def run(name: str, host: str | None, words: tuple[str, ...]) -> None:
    """Run a command in the lab's environment.

    Its exit code becomes this one's.
    """
    _become(name, host, list(words))


@command.command()
@name_option
@click.option("--on", "host", metavar="HOST", help="On this host; else where slurmctld runs.")
def shell(name: str, host: str | None) -> None:
    """Open a shell in the lab."""
    attach_inside(name)
    click.echo(f"in lab {name}{f', host {host}' if host else ''}: sbatch, srun and squeue work; exit leaves")
    _become(name, host, [process_environ().get("SHELL", "/bin/sh")])


@command.command()
@name_option
@click.option("--truth", type=click.Path(path_type=Path, dir_okay=False), help="Keep the log of truth in this file.")
def down(name: str, truth: Path | None) -> None:
    """End a lab and all that runs in it.

    Everything that was made for it is removed, also after a crash or when it was left half made.
    """
    if os.geteuid() != 0:
        raise UsageError(f"the lab needs root; this is user {os.geteuid()}: start it with sudo")
    existed = bring_down(name, truth=truth)
    click.echo(f"lab {name} is down" if existed else f"no lab {name} was up, and nothing was left of one")


@command.command()
@name_option
def truth(name: str) -> None:
    """Print the log of truth, one JSON object a line.

    Clocks, links, and the begin and end of each fault.
    """
    files = LabFiles.of(name)
    if not files.truth.exists():
        Lab.attach(name)  # says why there is none
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
            raise UsageError(f"host {host} does not see {folder}, because it has a /tmp of its own: {remedy}")
        click.echo(f"hpcpace: warning: hosts do not see {folder}, each has a /tmp of its own: {remedy}", err=True)
    if host is not None:
        words = command_on(lab.files, lab.plan.host(host), words, folder=folder)
    try:
        os.execvpe(words[0], words, lab.environ())
    except OSError as error:
        raise UsageError(f"cannot run {words[0]}: {error.strerror}") from error
