"""Faults of the network: slow, flapping and lossy links, a wrong MTU, foreign traffic. Called from inside the lab."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from hpcpace.errors import HpcpaceError, UsageError
from hpcpace.lab.environment import check_programs, lab_environ
from hpcpace.lab.fabric import lose_packets, set_mtu, set_rate, set_up
from hpcpace.lab.fault import HostFault, InsideLab, LabFault, Wait
from hpcpace.lab.hosts import command_on
from hpcpace.units import format_rate, parse_rate


@dataclass(frozen=True, kw_only=True)
class LinkFault(LabFault):
    """A fault of one link."""

    link: str

    @property
    def target(self) -> str:
        """The link."""
        return self.link

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link."""
        lab.plan.link(self.link)

    def _host_pid(self, lab: InsideLab) -> int | None:
        """Return the first process of the host at the lower end; None for an uplink."""
        return None if self.link in lab.plan.leaves else lab.pid(self.link)


@dataclass(frozen=True, kw_only=True)
class SlowLink(LinkFault):
    """Lowers the rate of a link in both directions."""

    kind = "slow-link"
    rate: str

    def check(self, lab: InsideLab) -> None:
        """Refuse an unknown link, an invalid rate, and one that is not lower."""
        super().check(lab)
        try:
            rate_bps = parse_rate(self.rate)
        except ValueError as error:
            raise UsageError(f"--rate: {error}") from error
        if rate_bps >= (own_bps := lab.plan.link(self.link).rate_bps):
            raise UsageError(f"--rate {self.rate} does not slow down {self.link}, which has {format_rate(own_bps)}")

    def apply(self, lab: InsideLab) -> None:
        """Shape both ends to the rate."""
        self._set(lab, parse_rate(self.rate))

    def undo(self, lab: InsideLab) -> None:
        """Shape both ends to the rate that the lab was started with."""
        self._set(lab, lab.plan.link(self.link).rate_bps)

    def _set(self, lab: InsideLab, rate_bps: int) -> None:
        set_rate(lab.plan.link(self.link), rate_bps, host_pid=self._host_pid(lab))


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

    def apply(self, lab: InsideLab) -> None:
        """Check that the host of the link is alive."""
        self._host_pid(lab)

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

    def undo(self, lab: InsideLab) -> None:
        """Bring the link up."""
        set_up(lab.plan.link(self.link), True)


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

    def apply(self, lab: InsideLab) -> None:
        """Let both ends lose what arrives."""
        lose_packets(lab.plan.link(self.link), self.share, host_pid=self._host_pid(lab))

    def undo(self, lab: InsideLab) -> None:
        """Let both ends receive everything again."""
        lose_packets(lab.plan.link(self.link), 0.0, host_pid=self._host_pid(lab))


@dataclass(frozen=True, kw_only=True)
class Traffic(LabFault):
    """Sends background traffic from one host to another with iperf3 over TCP."""

    kind = "traffic"
    source: str
    destination: str
    rate: str | None
    streams: int

    @property
    def target(self) -> str:
        """Both hosts."""
        return f"{self.source}->{self.destination}"

    def check(self, lab: InsideLab) -> None:
        """Refuse unknown hosts, the same host twice, an invalid rate, and a machine without iperf3."""
        if lab.plan.host(self.source) == lab.plan.host(self.destination):
            raise UsageError(f"traffic from {self.source} to itself crosses no link: name two different hosts")
        if self.rate is not None:
            try:
                parse_rate(self.rate)
            except ValueError as error:
                raise UsageError(f"--rate: {error}") from error
        check_programs({"iperf3": "iperf3"})

    def apply(self, lab: InsideLab) -> None:
        """Check that both hosts are alive."""
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

    def undo(self, lab: InsideLab) -> None:
        """Do nothing: the traffic has stopped."""

    def _running(self, lab: InsideLab, host: str, command: list[str]) -> _Running:
        # The server may start late: the shell restarts a client that is refused.
        again = f"for _ in 1 2 3 4 5 6 7 8; do {' '.join(command)} && break; sleep 0.5; done"
        words = ["sh", "-c", again] if "--client" in command else command
        return _Running(command_on(lab.files, lab.plan.host(host), words), lab_environ(lab.files))


class _Running:
    """A process group that ends with the `with` statement."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._command, self._environ = command, environ

    def __enter__(self) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, stdin=null, stdout=null, stderr=null, env=self._environ, start_new_session=True
        )
        return self._process

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True, kw_only=True)
class ChangeMtu(HostFault):
    """Gives the eth0 of a host another MTU than the rest of the network."""

    kind = "mtu"
    mtu: int

    def apply(self, lab: InsideLab) -> None:
        """Set the MTU."""
        set_mtu(lab.pid(self.host), self.mtu)

    def undo(self, lab: InsideLab) -> None:
        """Restore the lab's MTU."""
        set_mtu(lab.pid(self.host), lab.plan.config.mtu)
