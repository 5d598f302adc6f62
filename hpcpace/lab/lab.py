"""A handle on a lab: bring one up, attach to it, run commands in it, show its state, bring it down."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hpcpace.core.codec import convert, parse_json
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import write_json
from hpcpace.core.text import format_bytes, format_rate
from hpcpace.lab.emulated import install_library
from hpcpace.lab.fabric import (
    Anchor,
    LinkCounters,
    check_requirements,
    lab_command,
    lab_environ,
    read_counters,
    start_anchor,
)
from hpcpace.lab.faults import UNFINISHED, FaultRecord, fault_records
from hpcpace.lab.hosts import has_slurmd, host_pid, is_lab_host, remove_cgroups, thaw_all
from hpcpace.lab.plan import (
    BASE,
    LabFiles,
    LabHost,
    LabPlan,
    TruthLog,
    check_base,
    read_config,
    writable_to_owner_only,
    write_config,
)
from hpcpace.lab.settings import LabConfig

Progress = Callable[[str, int, int], None]
_TMP = Path("/tmp")


class Lab:
    """A lab that is up, from `up` or `attach`; as a context manager it is brought down at the end."""

    def __init__(self, files: LabFiles, plan: LabPlan, anchor: Anchor) -> None:
        self.files = files
        self.plan = plan
        self._anchor = anchor

    @classmethod
    def up(cls, config: LabConfig, progress: Progress = lambda *_: None) -> Lab:
        """Boot a lab and return it once every host accepts jobs.

        Anything left behind by an earlier lab with this name, crashed or incomplete, is removed first.

        Args:
            config: settings of the lab.
            progress: called with what is counted, the current count, and the final count.

        Raises:
            UsageError: not root, programs are missing, or a lab with this name is up.
            HpcpaceError: it did not come up; everything has been removed again.
        """
        check_requirements()
        files = LabFiles.of(config.name)
        _refuse_inside()
        config = dataclasses.replace(config, share=_shared_folders(config.share))
        plan = LabPlan(config)
        with _locked(files):
            anchor = read_anchor(files)
            if anchor and anchor.is_alive and files.ready_json.exists():
                raise UsageError(
                    f"lab {config.name!r} is up already: `hpcpace lab down{_name_option(config.name)}` ends it, "
                    "`hpcpace lab up --name OTHER` boots another one"
                )
            _remove(files, anchor)
            try:
                with writable_to_owner_only():
                    return cls._boot(files, plan, progress)
            except BaseException:
                _remove(files, read_anchor(files))
                raise

    @classmethod
    def _boot(cls, files: LabFiles, plan: LabPlan, progress: Progress) -> Lab:
        begin_s = time.monotonic()
        files.folder.mkdir(mode=0o755)
        write_config(files, plan.config)
        install_library(files)
        anchor = start_anchor(files.log("anchor"), lab_environ(files))
        write_json(files.anchor_json, dataclasses.asdict(anchor))
        program = [sys.executable, "-P", "-m", "hpcpace.lab.boot", files.name]
        command = lab_command(anchor, program, folder=Path("/"))
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=lab_environ(files)) as booting:
            assert booting.stdout is not None and booting.stderr is not None
            for line in booting.stdout:
                progress(*json.loads(line))
            reason = booting.stderr.read().strip()
        if booting.returncode:
            raise HpcpaceError(f"lab {files.name!r} did not come up: {reason}")
        TruthLog(files.truth).write_lab(plan)
        write_json(files.ready_json, {"boot_s": round(time.monotonic() - begin_s, 3)})
        return cls(files, plan, anchor)

    @classmethod
    def attach(cls, name: str) -> Lab:
        """Return the lab with this name.

        Raises:
            UsageError: it is not up; the message says what to do.
        """
        files = LabFiles.of(name)
        anchor = read_anchor(files)
        if anchor and anchor.is_here:
            return cls(files, LabPlan(read_config(files)), anchor)
        if is_lab_host():
            raise UsageError(
                "this is a host of a lab: use `hpcpace lab` outside the lab, or from `hpcpace lab run` without --on"
            )
        if not files.folder.exists():
            others = ", ".join(labs()) or "none"
            raise UsageError(
                f"no lab {name!r} is up (labs here: {others}): `hpcpace lab up{_name_option(name)}` boots one"
            )
        if anchor is None or not files.ready_json.exists():
            raise UsageError(
                f"lab {name!r} is still coming up, or is incomplete: `hpcpace lab up{_name_option(name)}` boots it "
                f"again, `hpcpace lab down{_name_option(name)}` removes it"
            )
        if not anchor.is_alive:
            raise UsageError(
                f"lab {name!r} has died (process {anchor.pid} is gone): `hpcpace lab down{_name_option(name)}` removes "
                f"what is left of it, `hpcpace lab up{_name_option(name)}` boots it again"
            )
        return cls(files, LabPlan(read_config(files)), anchor)

    @property
    def is_here(self) -> bool:
        """Whether this process runs in the lab."""
        return self._anchor.is_here

    def __enter__(self) -> Lab:
        """Return the lab."""
        return self

    def __exit__(self, *_: object) -> None:
        """Bring the lab down."""
        bring_down(self.files.name)

    def command(self, command: Sequence[str | os.PathLike[str]], *, folder: Path | None = None) -> list[str]:
        """Return the command line that runs a command in the lab, in `folder` or the caller's working folder."""
        words = [os.fspath(word) for word in command]
        return words if self.is_here else lab_command(self._anchor, words, folder=folder or Path.cwd())

    def environ(self) -> dict[str, str]:
        """Return the environment for commands in the lab."""
        return lab_environ(self.files)

    def run(
        self,
        *command: str | os.PathLike[str],
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the lab, such as srun, and return the completed process.

        Args:
            command: the program and its arguments.
            cwd: folder to run it in.
            environ: additional variables.
            timeout_s: time limit in seconds.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        return subprocess.run(
            self.command(command, folder=cwd),
            env={**self.environ(), **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def labs() -> list[str]:
    """Return the names of all labs of this machine that came up, including those that have died since."""
    return sorted(path.name for path in BASE.glob("*") if LabFiles(path).ready_json.exists())


def read_anchor(files: LabFiles) -> Anchor | None:
    """Return the recorded first process of a lab; None if there is no record."""
    try:
        return convert(parse_json(files.anchor_json.read_text()), Anchor)
    except (OSError, ValueError):
        return None


def bring_down(name: str, *, truth: Path | None = None) -> bool:
    """End every process of a lab and remove everything made for it, even if it has died or is incomplete.

    Args:
        name: name of the lab.
        truth: file to copy its log of truth to, which is removed otherwise.

    Returns:
        Whether there was anything to remove.

    Raises:
        UsageError: the log of truth cannot be copied, and the lab is left alone; or called from inside a lab.
        HpcpaceError: a process does not end, or something cannot be removed.
    """
    files = LabFiles.of(name)
    if not BASE.is_dir():
        return False
    _refuse_inside()
    with _locked(files):
        anchor = read_anchor(files)
        if truth is not None and files.truth.exists():
            try:
                _keep(files.truth, truth)
            except OSError as error:
                raise UsageError(f"cannot copy the log of truth to {truth}: {error.strerror}") from error
        return _remove(files, anchor)


def _keep(log: Path, place: Path) -> None:
    """Copy a file; replace only a regular file and follow no link, because others may write there as well."""
    with Folder.open(place.parent) as folder:
        if folder.has(place.name):
            os.close(folder.open_file(place.name))
        folder.write(place.name, log.read_bytes())


def _remove(files: LabFiles, anchor: Anchor | None) -> bool:
    thaw_all(files.name)
    if anchor is not None:
        anchor.kill()
    remove_cgroups(files.name)
    if not files.folder.exists():
        return False
    shutil.rmtree(files.folder)
    return True


@contextmanager
def _locked(files: LabFiles) -> Iterator[None]:
    lock = _open_lock(files.lock)
    while lock is None:
        lock = _open_lock(files.lock)
    with lock:
        try:
            yield
        finally:
            files.lock.unlink(missing_ok=True)
            with suppress(OSError):  # another lab is there
                files.lock.parent.rmdir()


def _open_lock(path: Path) -> IO[str] | None:
    """Return the locked lock file; None if another command has just removed it."""
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        check_base()
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w")
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        is_current = False
    except BlockingIOError:
        lock.close()
        raise UsageError(f"another command is bringing lab {path.stem!r} up or down: wait for it to finish") from None
    if is_current:
        return lock
    lock.close()
    return None


def _refuse_inside() -> None:
    inside = next(
        (anchor for path in BASE.glob("*") if (anchor := read_anchor(LabFiles(path))) and anchor.is_here), None
    )
    if inside is not None or is_lab_host():
        raise UsageError("this shell is in a lab: leave it first, because labs are brought up and down from outside")


def _shared_folders(requested: Sequence[str]) -> tuple[str, ...]:
    # Without sharing them, a Python environment or working folder below /tmp would be missing on the hosts.
    missing = [text for text in requested if not Path(text).is_dir()]
    if missing:
        raise UsageError(f"lab.share: no such folder: {', '.join(missing)}")
    own = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], Path.cwd()]
    below = {path for path in (Path(text).resolve() for text in (*requested, *map(str, own))) if _TMP in path.parents}
    # A folder inside another shared folder is shared already.
    return tuple(sorted(str(path) for path in below if not below & set(path.parents)))


def _name_option(name: str) -> str:
    return "" if name == LabConfig().name else f" --name {name}"


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
