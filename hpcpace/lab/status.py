"""The state of a lab: hosts, links with their traffic, jobs and faults, as tables."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hpcpace.core.text import format_bytes, format_rate
from hpcpace.lab.fabric import LinkCounters, read_counters
from hpcpace.lab.faults import UNFINISHED, FaultRecord, fault_records
from hpcpace.lab.hosts import has_slurmd, host_pid
from hpcpace.lab.namespaces import lab_environ
from hpcpace.lab.plan import LabFiles, LabHost, LabPlan

_WELL = ("idle", "mixed", "allocated", "completing")


@dataclass(frozen=True, kw_only=True)
class HostStatus(LabHost):
    """One host of the lab's plan as it is now.

    Attributes:
        is_alive: whether its first process is running.
        has_slurmd: whether slurmd listens there; if it does not, Slurm may not have noticed yet.
        slurm_state: Slurm's state of the node, such as idle, mixed or down.
        num_cpus_used: number of CPUs allocated to jobs.
    """

    is_alive: bool
    has_slurmd: bool
    slurm_state: str
    num_cpus_used: int

    @property
    def is_well(self) -> bool:
        """Whether it is alive and accepts jobs."""
        return self.is_alive and self.has_slurmd and self.slurm_state in _WELL


@dataclass(frozen=True, kw_only=True)
class LabStatus:
    """The state of a lab at one moment.

    Attributes:
        name: name of the lab.
        emulation: a sentence on how computation is emulated; empty if it is not.
        num_cpus_per_host: CPUs that each host claims.
        hosts: all hosts in numerical order.
        links: hosts' links, then uplinks.
        problems: a sentence for each daemon that has ended.
        jobs: lines of squeue.
        faults: all faults, the oldest first.
    """

    name: str
    emulation: str
    num_cpus_per_host: int
    hosts: tuple[HostStatus, ...]
    links: tuple[LinkCounters, ...]
    problems: tuple[str, ...]
    jobs: tuple[str, ...]
    faults: tuple[FaultRecord, ...]

    @property
    def is_well(self) -> bool:
        """Whether the daemons run, every host accepts jobs and every link is up."""
        return not self.problems and all(host.is_well for host in self.hosts) and all(link.is_up for link in self.links)


def read_status(plan: LabPlan, files: LabFiles) -> LabStatus:
    """Return the state of the lab that the caller runs in.

    Raises:
        HpcpaceError: the links cannot be read.
    """
    pids = {host.name: pid for host in plan.hosts if (pid := host_pid(files, host)) is not None}
    problems = tuple(_ended_daemons(files))
    # Slurm's commands wait for a long time if slurmctld does not run.
    ask = (lambda *_: []) if problems else _slurm
    nodes = {line.split()[0]: line.split()[1:] for line in ask(files, "sinfo", "-h", "-N", "-o", "%n %T %C")}
    hosts = []
    for host in plan.hosts:
        state, cpus = nodes.get(host.name, ["unknown", "0/0/0/0"])
        hosts.append(
            HostStatus(
                **dataclasses.asdict(host),
                is_alive=host.name in pids,
                has_slurmd=host.name in pids and has_slurmd(pids[host.name]),
                slurm_state=state,
                num_cpus_used=int(cpus.split("/")[0]),
            )
        )
    return LabStatus(
        name=files.name,
        emulation=plan.emulation,
        num_cpus_per_host=plan.config.cpus_per_host,
        hosts=tuple(hosts),
        links=tuple(read_counters(plan, pids).values()),
        problems=problems,
        jobs=tuple(ask(files, "squeue", "-h", "-o", "%i %j %T %M %R")),
        faults=tuple(fault_records(files)),
    )


def _ended_daemons(files: LabFiles) -> Iterator[str]:
    for name in ("munged", "slurmctld"):
        try:
            os.kill(int(files.daemon_pid(name).read_text()), 0)
        except (OSError, ValueError):
            yield f"{name} has ended: its log is {files.log(name)}; `hpcpace lab down` and `up` restart the lab"


def _slurm(files: LabFiles, *command: str) -> list[str]:
    done = subprocess.run(command, env=lab_environ(files), capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


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
