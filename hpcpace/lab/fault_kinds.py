"""Faults of hosts, ranks, links and the network, by their names; for use inside the lab."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_rate, parse_rate
from hpcpace.lab.emulated import Clock, Holding, hold_packets, step_clock
from hpcpace.lab.fabric import (
    WAYS,
    Way,
    check_programs,
    cut_packets,
    detour,
    detour_devices,
    end_detour,
    lab_environ,
    lose_packets,
    set_mtu,
    set_rate,
    set_up,
)
from hpcpace.lab.hosts import (
    HostCgroup,
    LoadKind,
    host_pid,
    kill_host,
    living_pid,
    load_command,
    running_on,
    start_hosts,
)
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


BOTH_WAYS = "both"


@dataclass(frozen=True, kw_only=True)
class DirectedFault(LinkFault):
    """A fault of one link in one direction, or in both."""

    way: str = BOTH_WAYS

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the direction if it is only one."""
        return {name: value for name, value in super().settings().items() if (name, value) != ("way", BOTH_WAYS)}

    @property
    def _ways(self) -> tuple[Way, ...]:
        """The directions that it affects."""
        return tuple(way for way in WAYS if self.way in (way, BOTH_WAYS))


def _checked_rate(text: str) -> int:
    """Return the rate of an option --rate in bits per second."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise UsageError(f"--rate: {error}") from error


MAX_DELAY_S = 10.0


def _check_share(share: float) -> None:
    """Refuse a share of packets outside of 0 to 1."""
    if not 0 < share < 1:
        raise UsageError(f"--share is {share:g}: it must be above 0 and below 1, such as 0.01 for 1 %")


@dataclass(frozen=True, kw_only=True)
class SlowLink(DirectedFault):
    """Lowers the rate of a link."""

    kind = "slow-link"
    rate: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, an invalid rate, and one that is not lower."""
        super().check(lab)
        if _checked_rate(self.rate) >= (own_bps := lab.plan.link(self.link).rate_bps):
            raise UsageError(f"--rate {self.rate} does not slow down {self.link}, which has {format_rate(own_bps)}")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Shape the sending ends to the rate, or to that with which the lab was started."""
        link = lab.plan.link(self.link)
        rate_bps = parse_rate(self.rate) if is_on else link.rate_bps
        set_rate(link, rate_bps, ways=self._ways, host_pid=self._host_pid(lab))


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
class LossyLink(DirectedFault):
    """Loses a share of the packets on a link at random."""

    kind = "loss"
    share: float

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, a share outside of 0 to 1, and a machine without nft."""
        super().check(lab)
        _check_share(self.share)
        check_programs({"nft": "nftables"})

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Let the receiving ends lose some of what arrives, or nothing."""
        share = self.share if is_on else 0.0
        lose_packets(lab.plan.link(self.link), share, ways=self._ways, host_pid=self._host_pid(lab))


@dataclass(frozen=True, kw_only=True)
class HoldingFault(DirectedFault):
    """Holds packets of a link on their way; one fault of a link can, because they all take a detour."""

    delay_s: float

    @property
    @abstractmethod
    def _holding(self) -> Holding:
        """How packets are held in the directions that it affects."""

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, a delay of nothing or too much, and a link that has such a fault already."""
        super().check(lab)
        if not 0 < self.delay_s <= MAX_DELAY_S:
            allowed = f"above 0 and at most {MAX_DELAY_S:g}, such as 0.01 for 10 ms"
            raise UsageError(f"--delay is {self.delay_s:g} s: it must be {allowed}")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Lead the link around by way of this process, or connect it with its switch again."""
        link = lab.plan.link(self.link)
        if is_on:
            self._host_pid(lab)
            detour(link, lab.plan.switch_above(link))
        else:
            end_detour(link, lab.plan.switch_above(link))

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Forward packets until the end."""
        nothing = Holding(delay_s=0.0)
        up, down = (self._holding if way in self._ways else nothing for way in WAYS)
        dropped = hold_packets(detour_devices(lab.plan.link(self.link)), (up, down), lambda: wait(0.0))
        note("forwarded", num_dropped=dropped)


@dataclass(frozen=True, kw_only=True)
class Latency(HoldingFault):
    """Holds all packets of a link for the same time."""

    kind = "latency"

    @property
    def _holding(self) -> Holding:
        return Holding(delay_s=self.delay_s)


@dataclass(frozen=True, kw_only=True)
class Reordering(HoldingFault):
    """Holds a share of the packets of a link, so that later ones overtake them."""

    kind = "reorder"
    share: float

    @property
    def _holding(self) -> Holding:
        return Holding(delay_s=self.delay_s, share=self.share)

    def check(self, lab: InsideLab) -> None:
        """Refuse what `HoldingFault` refuses, and a share outside of 0 to 1."""
        super().check(lab)
        _check_share(self.share)

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Lead the link around, and cut packets to the MTU: else up to 64 KiB would be held at once."""
        super().switch(lab, is_on)
        cut_packets(lab.plan.link(self.link), is_on, host_pid=self._host_pid(lab))


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
        # The server may start late: the shell restarts a client that is refused.
        again = ["sh", "-c", f"for _ in 1 2 3 4 5 6 7 8; do {' '.join(client)} && break; sleep 0.5; done"]
        source, destination = lab.plan.host(self.source), lab.plan.host(self.destination)
        with running_on(lab.files, destination, server), running_on(lab.files, source, again) as sending:
            while not wait(0.5):
                if sending.poll() is not None:
                    raise HpcpaceError(f"iperf3 on {self.source} ended with status {sending.returncode}")


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
class Neighbour(HostFault):
    """Runs processes next to the job on a host: busy ones, or ones that copy memory all the time."""

    kind = "neighbour"
    load: str
    processes: int
    core: int | None

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host, and a core that this machine does not have or may not use."""
        super().check(lab)
        usable = sorted(os.sched_getaffinity(0))
        if self.core is not None and self.core not in usable:
            raise UsageError(f"--core is {self.core}: the cores of this machine are {', '.join(map(str, usable))}")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Check that the host is alive when it begins."""
        if is_on:
            lab.pid(self.host)

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        """Run the processes until the end."""
        command = load_command(LoadKind(self.load), self.core)
        with ExitStack() as running:
            host = lab.plan.host(self.host)
            started = [running.enter_context(running_on(lab.files, host, command)) for _ in range(self.processes)]
            while not wait(0.5):
                ended = next((one.returncode for one in started if one.poll() is not None), None)
                if ended is not None:
                    raise HpcpaceError(f"a neighbour on {self.host} ended with status {ended}")


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


MAX_STEP_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class ClockStep(HostFault):
    """Steps a clock of a host; undoing it steps the clock back."""

    kind = "clock"
    step_s: float
    clock: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown host, a step of nothing or too much, and a lab without the library that steps clocks."""
        super().check(lab)
        if not 0 < abs(self.step_s) <= MAX_STEP_S:
            raise UsageError(f"--step is {self.step_s:g} s: it must not be 0, and at most {MAX_STEP_S:g} either way")
        if not lab.files.clock_library.exists():
            raise UsageError(
                f"the clocks of lab {lab.files.name} cannot be stepped, because hpcpace/lab/host_clock.cpp was not "
                "compiled when it was started: run `python setup.py build_ext --inplace`, then start it again"
            )

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        """Step the clock, or back."""
        step_ns = round(self.step_s * NS_PER_S) if is_on else 0
        offset_ns = lab.plan.host(self.host).clock_offset_s * NS_PER_S
        step_clock(lab.pid(self.host), Clock(self.clock), step_ns, offset_ns=offset_ns)


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
    for kind in (
        SlowHost,
        SlowLink,
        FlapLink,
        LossyLink,
        Latency,
        Reordering,
        Traffic,
        Neighbour,
        PauseHost,
        ClockStep,
        KillHost,
        KillRank,
        FillDisk,
        ChangeMtu,
    )
}
