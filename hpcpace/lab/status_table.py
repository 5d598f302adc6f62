"""The state of a lab as tables for a terminal, at most 100 columns wide."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hpcpace.lab.faults import UNFINISHED, FaultRecord
from hpcpace.lab.status import LabStatus
from hpcpace.units import format_bytes, format_rate

_MAX_WIDTH = 100


def print_status(console: Console, status: LabStatus) -> None:
    """Print hosts, links, jobs and faults."""
    num_alive = sum(host.is_alive for host in status.hosts)
    console.print(f"lab {status.name}: {num_alive} of {len(status.hosts)} hosts alive", style="bold")
    if status.emulation:
        console.print(f"note: {status.emulation}")
    for problem in status.problems:
        console.print(problem, style="red", markup=False)
    console.print(_hosts(status))
    console.print(_links(status))
    if status.jobs:
        console.print("Jobs", style="bold")
        for line in status.jobs:
            console.print(f"  {line}", markup=False)
    present = [record for record in status.faults if record.state in (*UNFINISHED, "lost")]
    if present:
        print_faults(console, present)
    if num_past := len(status.faults) - len(present):
        console.print(f"{num_past} more faults, over or failed: `hpcpace lab fault list`", markup=False)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _hosts(status: LabStatus) -> Table:
    table = _table("host", "address", "leaf", "Slurm", "CPUs used", "clock", right=("CPUs used", "clock"))
    for host in status.hosts:
        state = host.slurm_state
        if not host.is_alive:
            state += " (host is dead)"
        elif not host.has_slurmd:
            state += " (no slurmd yet)"
        cpus = f"{host.num_cpus_used} of {status.num_cpus_per_host}"
        style = "" if host.is_well else "red"
        table.add_row(host.name, host.address, host.leaf, state, cpus, f"+{host.clock_offset_s} s", style=style)
    return table


def _links(status: LabStatus) -> Table:
    table = _table("link", "rate", "up", "down", "dropped", "", right=("rate", "up", "down", "dropped"))
    for link in status.links:
        table.add_row(
            link.name,
            format_rate(link.rate_bps) if link.rate_bps else "-",
            format_bytes(link.tx_bytes),
            format_bytes(link.rx_bytes),
            str(link.dropped),
            "" if link.is_up else "no carrier",
            style="" if link.is_up else "red",
        )
    return table


def print_faults(console: Console, records: Sequence[FaultRecord]) -> None:
    """Print a table of faults, with their messages below it."""
    table = _table("fault", "kind", "target", "settings", "state")
    for record in records:
        table.add_row(*fault_words(record), style="yellow" if record.state in UNFINISHED else "dim")
    console.print(table)
    for record in records:
        if record.message:
            console.print(f"- {record.fault_id}: {record.message}", markup=False)


def fault_words(record: FaultRecord) -> tuple[str, str, str, str, str]:
    """Return id, kind, target, settings and state of a fault as text."""
    target = record.fault.target
    named = {**record.settings, "after_s": record.start_s or None, "for_s": record.duration_s}
    settings = [f"{key}={value}" for key, value in named.items() if value is not None and str(value) not in target]
    return record.fault_id, record.kind, target, " ".join(settings), record.state


def table_console() -> Console:
    """Return the console for tables: as wide as the terminal, at most 100 columns; 100 columns for a log."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    return Console(width=min(columns, _MAX_WIDTH), highlight=False, emoji=False)
