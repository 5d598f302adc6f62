"""Faults of hosts, ranks, links and the network, by their names; for use inside the lab."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.text import format_rate, parse_rate
from hpcpace.lab.fabric import lose_packets, set_mtu, set_rate, set_up
from hpcpace.lab.hosts import HostCgroup, command_on, host_pid, kill_host, living_pid, start_hosts
from hpcpace.lab.namespaces import check_programs, lab_environ
from hpcpace.lab.plan import LabFiles, LabPlan

Wait = Callable[[float | None], bool]
"""Wait this many seconds, or without limit, and return whether to undo the fault now."""


@dataclass(frozen=True)
class InsideLab:
    """A lab as its faults see it: its plan and its files."""

    plan: LabPlan
    files: LabFiles

    def pid(self, host: str) -> int:
        """Return the first process of a host, which must be alive."""
        return living_pid(self.files, self.plan.host(host))

    def cgroup(self, host: str, *, is_alive: bool) -> HostCgroup:
        """Return the control group of a host, which may have to be alive."""
        if is_alive:
            self.pid(host)
        return HostCgroup(self.files.name, self.plan.host(host).name)


class LabFault(ABC):
    """One kind of fault; subclasses are frozen dataclasses with its settings."""

    kind: ClassVar[str]
    target_form: ClassVar[str]
    """How `target` is made of the settings."""
    is_instant: ClassVar[bool] = False
    """Whether it is over as soon as it has been applied, and cannot be undone."""

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dict(vars(self))

    @property
    def target(self) -> str:
        """What it affects; a target can have one fault of a kind at a time."""
        return self.target_form.format(**vars(self))

    def check(self, lab: InsideLab) -> None:  # noqa: B027
        """Raise a UsageError if the settings do not fit the lab."""

    @abstractmethod
    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Inject the fault, or restore what can be restored."""

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Keep the fault active until `wait` returns true; `note` adds events to the log of truth."""
        wait(None)


@dataclass(frozen=True, kw_only=True)
class HostFault(LabFault):
    """A fault of one host."""

    target_form = "{host}"
    host: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host."""
        lab.plan.host(self.host)


@dataclass(frozen=True, kw_only=True)
class LinkFault(LabFault):
    """A fault of one link."""

    target_form = "{link}"
    link: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link."""
        lab.plan.link(self.link)

    def _host_pid(self, lab: InsideLab) -> int | None:
        """Return the first process of the host at the lower end; None for an uplink."""
        return None if self.link in lab.plan.leaves else lab.pid(self.link)


def _checked_rate(text: str) -> int:
    """Return the rate of an option --rate in bits per second."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise UsageError(f"--rate: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SlowLink(LinkFault):
    """Lowers the rate of a link in both directions."""

    kind = "slow-link"
    rate: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, an invalid rate, and one that is not lower."""
        super().check(lab)
        if _checked_rate(self.rate) >= (own_bps := lab.plan.link(self.link).rate_bps):
            raise UsageError(f"--rate {self.rate} does not slow down {self.link}, which has {format_rate(own_bps)}")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Shape both ends to the rate, or to that with which the lab was started."""
        link = lab.plan.link(self.link)
        set_rate(link, parse_rate(self.rate) if is_on else link.rate_bps, host_pid=self._host_pid(lab))


@dataclass(frozen=True, kw_only=True)
class FlapLink(LinkFault):
    """Takes a link down for part of each period."""

    kind = "flap-link"
    period_s: float
    down_s: float

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, and times that do not fit each other."""
        super().check(lab)
        if not 0 < self.down_s < self.period_s:
            raise UsageError(
                f"--down is {self.down_s:g} s and --period {self.period_s:g} s: "
                "--down must be above 0 and below --period"
            )

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Check that the host of the link is alive, or bring the link up."""
        if is_on:
            self._host_pid(lab)
        else:
            set_up(lab.plan.link(self.link), True)

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Take the link down and up until the end."""
        link, is_over = lab.plan.link(self.link), False
        while not is_over:
            set_up(link, False)
            note("link-down")
            is_over = wait(self.down_s)
            set_up(link, True)
            note("link-up")
            is_over = is_over or wait(self.period_s - self.down_s)


@dataclass(frozen=True, kw_only=True)
class LossyLink(LinkFault):
    """Loses a share of the packets on a link at random, in both directions."""

    kind = "loss"
    share: float

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, a share outside of 0 to 1, and a machine without nft."""
        super().check(lab)
        if not 0 < self.share < 1:
            raise UsageError(f"--share is {self.share:g}: it must be above 0 and below 1, such as 0.01 for 1 %")
        check_programs({"nft": "nftables"})

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Let both ends lose some of what arrives, or nothing."""
        lose_packets(lab.plan.link(self.link), self.share if is_on else 0.0, host_pid=self._host_pid(lab))


@dataclass(frozen=True, kw_only=True)
class Traffic(LabFault):
    """Sends background traffic from one host to another with iperf3 over TCP."""

    kind = "traffic"
    target_form = "{source}->{destination}"
    source: str
    destination: str
    rate: str | None
    streams: int

    def check(self, lab: InsideLab) -> None:
        """Refuse unknown hosts, the same host twice, an invalid rate, and a machine without iperf3."""
        if lab.plan.host(self.source) == lab.plan.host(self.destination):
            raise UsageError(f"traffic from {self.source} to itself crosses no link: name two different hosts")
        if self.rate is not None:
            _checked_rate(self.rate)
        check_programs({"iperf3": "iperf3"})

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Check that both hosts are alive when it begins."""
        if is_on:
            lab.pid(self.source)
            lab.pid(self.destination)

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Run a server and a client until the end."""
        port = str(20000 + os.getpid() % 10000)
        limit = [] if self.rate is None else ["--bitrate", str(parse_rate(self.rate) // self.streams)]
        server = ["iperf3", "--server", "--one-off", "--port", port]
        client = ["iperf3", "--client", lab.plan.host(self.destination).address, "--port", port, "--time", "0"]
        client += ["--connect-timeout", "5000", "--parallel", str(self.streams), *limit]
        with self._running(lab, self.destination, server), self._running(lab, self.source, client) as sending:
            while not wait(0.5):
                if sending.poll() is not None:
                    raise HpcpaceError(f"iperf3 on {self.source} ended with status {sending.returncode}")

    @contextmanager
    def _running(self, lab: InsideLab, host: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command on a host during the block; its process group ends with it."""
        # The server may start late: the shell restarts a client that is refused.
        again = f"for _ in 1 2 3 4 5 6 7 8; do {' '.join(command)} && break; sleep 0.5; done"
        words = ["sh", "-c", again] if "--client" in command else command
        line = command_on(lab.files, lab.plan.host(host), words)
        environ, null = lab_environ(lab.files), subprocess.DEVNULL
        process = subprocess.Popen(line, stdin=null, stdout=null, stderr=null, env=environ, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(frozen=True, kw_only=True)
class ChangeMtu(HostFault):
    """Gives the eth0 of a host another MTU than the rest of the network."""

    kind = "mtu"
    mtu: int

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Set the MTU, or restore that of the lab."""
        set_mtu(lab.pid(self.host), self.mtu if is_on else lab.plan.config.mtu)


FILLER = ".hpcpace-lab-filler"


@dataclass(frozen=True, kw_only=True)
class SlowHost(HostFault):
    """Limits the CPU time of a host to a number of cores."""

    kind = "slow-host"
    cores: float

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host, and limits that leave nothing or change nothing."""
        super().check(lab)
        most = lab.plan.config.cpu_quota or float(os.cpu_count() or 1)
        if not 0 < self.cores < most:
            raise UsageError(
                f"--cores is {self.cores:g}: it must be more than 0 and less than the {most:g} that the host has now"
            )

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Set the CPU quota, or restore that with which the lab was started."""
        lab.cgroup(self.host, is_alive=is_on).limit_cpu(self.cores if is_on else lab.plan.config.cpu_quota)


@dataclass(frozen=True, kw_only=True)
class PauseHost(HostFault):
    """Stops every process of a host, like heavy swapping or a busy hypervisor."""

    kind = "pause-host"

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Freeze the host, or let it continue."""
        lab.cgroup(self.host, is_alive=is_on).freeze(is_on)


@dataclass(frozen=True, kw_only=True)
class KillHost(HostFault):
    """Ends everything on a host and its network at once and silently, like a power cut."""

    kind = "kill-host"

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Kill the first process of the host, which only loses its link if it is dead already; or boot the host again.

        It then has an empty /tmp, the same clock offset, and slurmd as its only process.
        """
        host = lab.plan.host(self.host)
        if is_on:
            kill_host(lab.plan, lab.files, host)
        elif host_pid(lab.files, host) is None:
            start_hosts(lab.plan, lab.files, [host], lab_environ(lab.files))


@dataclass(frozen=True, kw_only=True)
class KillRank(LabFault):
    """Sends a signal, by default SIGKILL, to one rank of a running job."""

    kind = "kill-rank"
    target_form = "{job}/{rank}"
    is_instant = True
    job: int
    rank: int
    signal: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown signal."""
        if f"SIG{self.signal}" not in signal.Signals.__members__:
            raise UsageError(f"--signal {self.signal}: no such signal; name one like KILL, TERM or STOP")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Send the signal to the process of the rank."""
        rank_process(self.job, self.rank).send_signal(signal.Signals[f"SIG{self.signal}"])


def rank_process(job: int, rank: int) -> psutil.Process:
    """Return the process of a rank of the job's last step: the oldest process of that task.

    Raises:
        UsageError: no such rank is running.
    """
    wanted = {"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank)}
    found: list[tuple[int, float, psutil.Process]] = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            step = environ.get("SLURM_STEP_ID", "")
            if wanted.items() <= environ.items() and step.isdigit() and int(step) < 1 << 31:
                found.append((-int(step), process.create_time(), process))
        except psutil.Error:
            continue
    if not found:
        raise UsageError(f"no rank {rank} of job {job} is running: `hpcpace lab status` lists the jobs")
    return min(found, key=lambda entry: entry[:2])[2]


@dataclass(frozen=True, kw_only=True)
class FillDisk(HostFault):
    """Fills the /tmp of a host."""

    kind = "fill-disk"
    left_bytes: int

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Allocate a file of the free size, three times, in case others free some space meanwhile; or remove it."""
        # Everybody on the host may write to its /tmp, so this name may be a link to a file of the machine.
        with Folder.open(self._tmp(lab)) as tmp:
            with suppress(FileNotFoundError):
                os.unlink(FILLER, dir_fd=tmp.descriptor)
            if not is_on:
                return
            filler = tmp.create_file(FILLER, mode=0o600)
        with closing_descriptor(filler):
            size = 0
            for _ in range(3):
                state = os.fstatvfs(filler)
                free = state.f_bavail * state.f_frsize - self.left_bytes
                if free <= 0:
                    return
                size += free
                os.posix_fallocate(filler, 0, size)

    def _tmp(self, lab: InsideLab) -> Path:
        return Path(f"/proc/{lab.pid(self.host)}/root/tmp")


KINDS: dict[str, Callable[..., LabFault]] = {
    kind.kind: kind
    for kind in (SlowHost, SlowLink, FlapLink, LossyLink, Traffic, PauseHost, KillHost, KillRank, FillDisk, ChangeMtu)
}
