"""`hpcpace lab`: boot a real Slurm with several hosts on this machine, and inject faults.

A command enters a lab by replacing itself with a copy that starts in the lab's namespaces.
"""

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
from hpcpace.cli.options import PATH, Real, Whole, headed, option, setting, settings
from hpcpace.config import LabConfig
from hpcpace.config_sources import load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.text import format_rate, parse_rate
from hpcpace.lab.environment import NAME_VARIABLE
from hpcpace.lab.fault import InsideLab, LabFault
from hpcpace.lab.fault_kinds import (
    ChangeMtu,
    FillDisk,
    FlapLink,
    KillHost,
    KillRank,
    LossyLink,
    PauseHost,
    SlowHost,
    SlowLink,
    Traffic,
)
from hpcpace.lab.faults import FaultRecord, fault_records, start_fault, undo_fault
from hpcpace.lab.files import LabFiles
from hpcpace.lab.hosts import command_on
from hpcpace.lab.lab import Lab, bring_down
from hpcpace.lab.status import fault_words, print_faults, print_status, read_status, table_console

name_option = option(
    "--name",
    metavar="NAME",
    envvar=NAME_VARIABLE,
    default=LabConfig().name,
    show_default=True,
    help="Use the lab of this name.",
)


def attach_inside(name: str) -> Lab:
    """Return the lab of this name, seen from inside: a command that runs outside restarts itself in there.

    Raises:
        UsageError: the user is not root, or no such lab is up.
    """
    if os.geteuid() != 0:
        raise UsageError(f"the lab needs root; this is user {os.geteuid()}: start it with sudo")
    lab = Lab.attach(name)
    if not lab.is_here:
        again = lab.command([sys.executable, "-P", "-m", "hpcpace", *sys.argv[1:]])
        os.execvpe(again[0], again, lab.environ())
    return lab


MOST_S = 1_000_000
MOST_CORES = 1024


@click.group(cls=Group)
def fault() -> None:
    """Inject, list and undo faults.

    The log of truth has the beginning and end of each.
    """


_start = option("--start", type=Real(0, MOST_S), default=0.0, show_default=True, help="Begin after this many seconds.")
_duration = option(
    "--duration",
    type=Real(0, MOST_S, is_open=True),
    help="Undo it after this many seconds.",
    show_default="until undone",
)
_timed = headed("When, and in which lab", _start, _duration, name_option)
_at_once = headed("When, and in which lab", _start, name_option)


def _inject(name: str, what: LabFault, start: float, duration: float | None = None) -> None:
    lab = attach_inside(name)
    record = start_fault(InsideLab(lab.plan, lab.files), what, start_s=start, duration_s=duration)
    _say(record)


def _say(record: FaultRecord) -> None:
    click.echo(" ".join(filter(None, fault_words(record))))


@fault.command("slow-host")
@click.argument("host")
@headed(
    "What",
    option(
        "--cores",
        type=Real(0, MOST_CORES, is_open=True),
        default=0.25,
        show_default=True,
        help="Leave the host this many cores' worth of processor time.",
    ),
)
@_timed
def slow_host(name: str, host: str, cores: float, start: float, duration: float | None) -> None:
    """Limit the processor time of HOST."""
    _inject(name, SlowHost(host=host, cores=cores), start, duration)


@fault.command("slow-link")
@click.argument("link")
@headed(
    "What",
    option("--rate", required=True, metavar="RATE", help="Lower the rate to this, like 100mbit."),
)
@_timed
def slow_link(name: str, link: str, rate: str, start: float, duration: float | None) -> None:
    """Lower the rate of LINK.

    LINK is that of a host (n3) or the uplink of a leaf (leaf1).
    """
    _inject(name, SlowLink(link=link, rate=rate), start, duration)


@fault.command("flap-link")
@click.argument("link")
@headed(
    "What",
    option(
        "--period",
        type=Real(0, MOST_S, is_open=True),
        default=4.0,
        show_default=True,
        help="Take the link down once in this many seconds.",
    ),
    option(
        "--down",
        type=Real(0, MOST_S, is_open=True),
        default=1.0,
        show_default=True,
        help="Keep the link down for this many seconds each time.",
    ),
)
@_timed
def flap_link(name: str, link: str, period: float, down: float, start: float, duration: float | None) -> None:
    """Take LINK down once in each period."""
    _inject(name, FlapLink(link=link, period_s=period, down_s=down), start, duration)


@fault.command()
@click.argument("link")
@headed(
    "What",
    option(
        "--share",
        type=Real(0, 1, is_open=True),
        default=0.01,
        show_default=True,
        help="Drop this share of the packets, in each direction.",
    ),
)
@_timed
def loss(name: str, link: str, share: float, start: float, duration: float | None) -> None:
    """Drop packets on LINK at random.

    LINK is that of a host (n3) or the uplink of a leaf (leaf1). Needs nft.
    """
    _inject(name, LossyLink(link=link, share=share), start, duration)


@fault.command()
@click.argument("source")
@click.argument("destination")
@headed(
    "What",
    option("--rate", metavar="RATE", help="Send at this rate.", show_default="as fast as the network allows"),
    option("--streams", type=Whole(1, 64), default=1, show_default=True, help="Send over this many TCP connections."),
)
@_timed
def traffic(
    name: str, source: str, destination: str, rate: str | None, streams: int, start: float, duration: float | None
) -> None:
    """Send background traffic between two hosts.

    It goes over TCP from host SOURCE to host DESTINATION.
    """
    _inject(name, Traffic(source=source, destination=destination, rate=rate, streams=streams), start, duration)


@fault.command("pause-host")
@click.argument("host")
@_timed
def pause_host(name: str, host: str, start: float, duration: float | None) -> None:
    """Freeze every process of HOST."""
    _inject(name, PauseHost(host=host), start, duration)


@fault.command("kill-host")
@click.argument("host")
@_timed
def kill_host(name: str, host: str, start: float, duration: float | None) -> None:
    """Kill everything on HOST at once, as a power cut does.

    Undoing the fault boots it again.
    """
    _inject(name, KillHost(host=host), start, duration)


@fault.command("kill-rank")
@click.argument("job", type=Whole(1, (1 << 32) - 1))
@click.argument("rank", type=Whole(0))
@headed(
    "What",
    option("--signal", "signal_name", metavar="NAME", default="KILL", show_default=True, help="Send this signal."),
)
@_at_once
def kill_rank(name: str, job: int, rank: int, signal_name: str, start: float) -> None:
    """Send a signal to RANK of the running JOB."""
    _inject(name, KillRank(job=job, rank=rank, signal=signal_name), start)


@fault.command("fill-disk")
@click.argument("host")
@headed(
    "What",
    option(
        "--left",
        type=Whole(0, 1 << 50),
        metavar="BYTES",
        default=0,
        show_default=True,
        help="Leave this many bytes free.",
    ),
)
@_timed
def fill_disk(name: str, host: str, left: int, start: float, duration: float | None) -> None:
    """Fill the /tmp of HOST."""
    _inject(name, FillDisk(host=host, left_bytes=left), start, duration)


@fault.command()
@click.argument("host")
@headed(
    "What",
    option("--size", type=Whole(68, 65535), required=True, help="Set the MTU of its eth0 to this many bytes."),
)
@_timed
def mtu(name: str, host: str, size: int, start: float, duration: float | None) -> None:
    """Give HOST a different MTU from the rest of the network."""
    _inject(name, ChangeMtu(host=host, mtu=size), start, duration)


@fault.command("list")
@name_option
@option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_faults(name: str, as_json: bool) -> None:
    """Show all faults of the lab, the oldest first."""
    records = fault_records(attach_inside(name).files)
    if as_json:
        click.echo(json.dumps([record.to_json() for record in records], indent=2))
    elif records:
        print_faults(table_console(), records)
    else:
        click.echo("no faults were injected")


@fault.command()
@click.argument("fault_id", metavar="FAULT")
@name_option
def undo(name: str, fault_id: str) -> None:
    """Undo FAULT, like f2, or cancel it before it starts."""
    lab = attach_inside(name)
    _say(undo_fault(InsideLab(lab.plan, lab.files), fault_id))


@click.group(cls=Group)
def command() -> None:
    """Boot a cluster on this machine: real Slurm, shaped links, faults at known times."""


@command.command()
@headed(
    "Hosts",
    setting("lab", "name", "Name the lab; several can be up side by side.", metavar="NAME"),
    *settings(
        "lab",
        hosts="Boot this many hosts: n1, n2, ...",
        cpus_per_host="Let each host claim this many CPUs in Slurm, whatever the machine has.",
    ),
    setting(
        "lab",
        "cpu_quota",
        "Give each host at most this many cores' worth of processor time.",
        "unlimited",
        metavar="CORES",
    ),
    setting("lab", "tmp_size", "Give each host a /tmp of this size, in memory.", metavar="SIZE"),
    setting(
        "lab",
        "share",
        "Show this folder below /tmp to all hosts, too; may be given several times.",
        "the Python in use, hpcpace, the current folder",
        multiple=True,
        metavar="FOLDER",
    ),
    *settings("lab", clock_step_s="Set the clock of n1 ahead by this many seconds, that of n2 by twice as many, ..."),
)
@headed(
    "Network",
    *settings(
        "lab",
        leaves="Connect the hosts to this many leaf switches, in blocks, below one spine; at most as many as hosts.",
    ),
    setting(
        "lab", "link", "Shape the link from each host to its leaf, in each direction, like 10gbit.", metavar="RATE"
    ),
    setting("lab", "uplink", "Shape the link from each leaf to the spine, in each direction.", metavar="RATE"),
    *settings("lab", mtu="Set the largest packet of all links, in bytes."),
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
