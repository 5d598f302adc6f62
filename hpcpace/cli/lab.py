"""`hpcpace lab`: boot a real Slurm with several hosts on this machine, and inject faults.

A command enters a lab by replacing itself with a copy that starts in the lab's namespaces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import click

from hpcpace.cli.commands import Group
from hpcpace.cli.options import PATH, Real, Whole, headed, option, setting, settings, shown_progress
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, UsageError
from hpcpace.core.settings import load_config
from hpcpace.core.text import format_rate, parse_rate
from hpcpace.lab import fault_kinds as kinds
from hpcpace.lab.emulated import Clock
from hpcpace.lab.fabric import NAME_VARIABLE, WAYS
from hpcpace.lab.faults import FaultRecord, fault_records, start_fault, undo_fault
from hpcpace.lab.hosts import LoadKind, command_on
from hpcpace.lab.lab import Lab, bring_down, fault_words, print_faults, print_status, read_status, table_console
from hpcpace.lab.plan import LabFiles
from hpcpace.lab.settings import LabConfig

name_option = option(
    "--name", metavar="NAME", envvar=NAME_VARIABLE, default=LabConfig().name, help="Use the lab of this name."
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


MAX_S = 1_000_000
MAX_CORES = 1024


@click.group(cls=Group)
def fault() -> None:
    """Inject, list and undo faults.

    The log of truth has the beginning and end of each.
    """


_start = option("--start", type=Real(0, MAX_S), default=0.0, help="Begin after this many seconds.")
_duration = option(
    "--duration",
    type=Real(0, MAX_S, is_open=True),
    help="Undo it after this many seconds.",
    show_default="until undone",
)


def _say(record: FaultRecord) -> None:
    click.echo(" ".join(filter(None, fault_words(record))))


def _add_fault(
    kind: type[kinds.LabFault],
    name: str,
    words: str,
    arguments: Mapping[str, Any],
    *options: Callable[[Any], Any],
    lasts: bool = True,
) -> None:
    """Add the command that injects faults of a kind.

    Args:
        kind: its fields are the arguments and options.
        name: of the command.
        words: help.
        arguments: their types.
        options: of this kind.
        lasts: whether it has a duration.
    """

    def inject(name: str, start: float, duration: float | None = None, **values: Any) -> None:
        lab = attach_inside(name)
        _say(start_fault(kinds.InsideLab(lab.plan, lab.files), kind(**values), start_s=start, duration_s=duration))

    added = headed("When, and in which lab", _start, *([_duration] if lasts else []), name_option)(inject)
    added = headed("What", *options)(added)
    for argument, type_ in reversed(list(arguments.items())):
        added = click.argument(argument, type=type_)(added)
    fault.command(name, help=words)(added)


_HOST, _LINK = {"host": click.STRING}, {"link": click.STRING}
_OF_LINK = "LINK is that of a host (n3) or the uplink of a leaf (leaf1)."
_SECONDS = Real(0, MAX_S, is_open=True)
_way = option(
    "--way",
    type=click.Choice([*WAYS, kinds.BOTH_WAYS]),
    default=kinds.BOTH_WAYS,
    help="Let it hold for what goes up, towards the spine, for what comes down, or for both.",
)
_add_fault(
    kinds.SlowHost,
    "slow-host",
    "Limit the processor time of HOST.",
    _HOST,
    option(
        "--cores",
        type=Real(0, MAX_CORES, is_open=True),
        default=0.25,
        help="Leave the host this many cores' worth of processor time.",
    ),
)
_add_fault(
    kinds.SlowLink,
    "slow-link",
    f"Lower the rate of LINK.\n\n{_OF_LINK}",
    _LINK,
    option("--rate", required=True, metavar="RATE", help="Lower the rate to this, like 100mbit."),
    _way,
)
_add_fault(
    kinds.FlapLink,
    "flap-link",
    "Take LINK down once in each period.",
    _LINK,
    option("--period", "period_s", type=_SECONDS, default=4.0, help="Take the link down once in this many seconds."),
    option("--down", "down_s", type=_SECONDS, default=1.0, help="Keep the link down for this many seconds each time."),
)
_add_fault(
    kinds.LossyLink,
    "loss",
    f"Drop packets on LINK at random.\n\n{_OF_LINK} Needs nft.",
    _LINK,
    option("--share", type=Real(0, 1, is_open=True), default=0.01, help="Drop this share of the packets."),
    _way,
)
_delay_s = Real(0, kinds.MAX_DELAY_S, is_open=True)
_delay = option("--delay", "delay_s", type=_delay_s, default=0.01, help="Hold each packet for this many seconds.")
_add_fault(
    kinds.Latency, "latency", f"Add latency to LINK: packets are held on their way.\n\n{_OF_LINK}", _LINK, _delay, _way
)
_add_fault(
    kinds.Reordering,
    "reorder",
    f"Let packets on LINK overtake each other.\n\nSome are held on their way. {_OF_LINK}",
    _LINK,
    option("--share", type=Real(0, 1, is_open=True), default=0.05, help="Hold this share of the packets."),
    option("--delay", "delay_s", type=_delay_s, default=0.002, help="Hold them for this many seconds."),
    _way,
)
_add_fault(
    kinds.Traffic,
    "traffic",
    "Send background traffic between two hosts.\n\nIt goes over TCP from host SOURCE to host DESTINATION.",
    {"source": click.STRING, "destination": click.STRING},
    option("--rate", metavar="RATE", help="Send at this rate.", show_default="as fast as the network allows"),
    option("--streams", type=Whole(1, 64), default=1, help="Send over this many TCP connections."),
)
_add_fault(
    kinds.Neighbour,
    "neighbour",
    "Run processes beside the job on HOST.",
    _HOST,
    option(
        "--load",
        type=click.Choice([str(load) for load in LoadKind]),
        default=str(LoadKind.CPU),
        help="Take processor time, or memory bandwidth as well.",
    ),
    option("--processes", type=Whole(1, 64), default=1, help="Run this many processes."),
    option("--core", type=Whole(0), show_default="any", help="Run them on this core of the machine only."),
)
_add_fault(kinds.PauseHost, "pause-host", "Freeze every process of HOST.", _HOST)
_add_fault(
    kinds.ClockStep,
    "clock",
    "Step a clock of HOST.\n\nThat is what hypervisors and NTP do. Processes that have started in the lab see it.",
    _HOST,
    option(
        "--step",
        "step_s",
        type=Real(-kinds.MAX_STEP_S, kinds.MAX_STEP_S),
        default=0.05,
        help="Put it ahead by this many seconds, or back if they are negative.",
    ),
    option(
        "--clock",
        type=click.Choice([str(clock) for clock in Clock]),
        default=str(Clock.MONOTONIC),
        help="Take this clock; traces have times of CLOCK_MONOTONIC.",
    ),
)
_add_fault(
    kinds.KillHost,
    "kill-host",
    "Kill everything on HOST at once, as a power cut does.\n\nUndoing the fault boots it again.",
    _HOST,
)
_add_fault(
    kinds.KillRank,
    "kill-rank",
    "Send a signal to RANK of the running JOB.",
    {"job": Whole(1, (1 << 32) - 1), "rank": Whole(0)},
    option("--signal", metavar="NAME", default="KILL", help="Send this signal."),
    lasts=False,
)
_add_fault(
    kinds.FillDisk,
    "fill-disk",
    "Fill the /tmp of HOST.",
    _HOST,
    option(
        "--left", "left_bytes", type=Whole(0, 1 << 50), metavar="BYTES", default=0, help="Leave this many bytes free."
    ),
)
_add_fault(
    kinds.ChangeMtu,
    "mtu",
    "Give HOST a different MTU from the rest of the network.",
    _HOST,
    option("--size", "mtu", type=Whole(68, 65535), required=True, help="Set the MTU of its eth0 to this many bytes."),
)


@fault.command("list")
@name_option
@option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_faults(name: str, as_json: bool) -> None:
    """Show all faults of the lab, the oldest first."""
    records = fault_records(attach_inside(name).files)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
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
    _say(undo_fault(kinds.InsideLab(lab.plan, lab.files), fault_id))


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
    config = load_config(file=config_file, environ=process_environ(), options={"lab": values}).of(LabConfig)
    with shown_progress() as begin:
        stage = cache(begin)
        lab = Lab.up(config, lambda what, done, total: stage(what)(done, total))
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
        click.echo(json.dumps(dataclasses.asdict(state), indent=2))
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
