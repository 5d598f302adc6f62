"""`hpcpace lab fault`: break something in a lab at a known time, and repair it again."""

from __future__ import annotations

import json

import click

from hpcpace.cli.commands import Group
from hpcpace.cli.lab_inside import attach_inside, name_option
from hpcpace.cli.options import Real, Whole, headed, option
from hpcpace.lab.fault_kinds import (
    ChangeMtu,
    FillDisk,
    FlapLink,
    InsideLab,
    KillHost,
    KillRank,
    LabFault,
    LossyLink,
    PauseHost,
    SlowHost,
    SlowLink,
    Traffic,
)
from hpcpace.lab.faults import FaultRecord, fault_records, start_fault, undo_fault
from hpcpace.lab.status import fault_words, print_faults, table_console

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
