"""What a lab emulates because the kernel cannot do it: clocks that step on one host, and packets held on a link.

Clocks step when NTP sets them, or when a virtual machine was stopped or moved. All hosts have one CLOCK_REALTIME,
and the offsets of a time namespace are fixed. So the processes of a lab run with a preloaded library, host_clock.cpp,
which adds the steps that a file in their host's /dev/shm has.

Packets are held for latency and reordering without the kernel's netem. The link is taken off its switch and a pair of
devices put between (`fabric.detour`). Packets that arrive at one end are read from a packet socket, wait in a queue,
and are sent from the other end, where the kernel shapes them as before. The sockets pass on the kernel's note about
each packet (PACKET_VNET_HDR, packet(7)), so that up to 64 KiB that it has not segmented yet cross as one.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import mmap
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from hpcpace.core.compat import load_compiled
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, nanoseconds
from hpcpace.lab.plan import LabFiles

STEPS_FILE = "hpcpace-lab-clock"
"""In /dev/shm of each host: three int64, of `Steps` in host_clock.cpp."""
STEPS_BYTES = 24
_MONOTONIC, _FLOOR, _REALTIME = range(3)
_READ_AND_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PRELOAD = "LD_PRELOAD"


class Clock(StrEnum):
    """The clocks of a host that can be stepped; CLOCK_BOOTTIME goes with the first."""

    MONOTONIC = "monotonic"
    REALTIME = "realtime"


def install_library(files: LabFiles) -> None:
    """Put the library into a lab's folder, if it was compiled; each process that starts in the lab then loads it."""
    library = load_compiled(Path(__file__).with_name("host_clock.cpp"))
    if library is not None:
        with Folder.open(files.clock_library.parent) as folder:
            folder.write(files.clock_library.name, Path(library._name).read_bytes(), mode=0o755)


def preloading(files: LabFiles, environ: dict[str, str]) -> dict[str, str]:
    """Return the variable that preloads the library, next to what it has already; nothing without a library."""
    if not files.clock_library.exists():
        return {}
    return {_PRELOAD: " ".join(dict.fromkeys([str(files.clock_library), *environ.get(_PRELOAD, "").split()]))}


def step_clock(pid: int, clock: Clock, step_ns: int, *, offset_ns: int) -> None:
    """Let a clock of a host be off by a step from now on, instead of by the one before.

    Args:
        pid: first process of the host, as the caller sees it.
        clock: which one; CLOCK_MONOTONIC stands still for a step back, because it never goes back.
        step_ns: how far it is ahead.
        offset_ns: how far the CLOCK_MONOTONIC of the host's time namespace is ahead of the caller's.
    """
    with (
        Folder.open(Path(f"/proc/{pid}/root/dev/shm")) as folder,
        closing_descriptor(os.open(STEPS_FILE, _READ_AND_WRITE, dir_fd=folder.descriptor)) as file,
        mmap.mmap(file, STEPS_BYTES) as mapped,
        memoryview(mapped) as raw,
        raw.cast("q") as steps,  # so that each is stored at once
    ):
        if clock is Clock.REALTIME:
            steps[_REALTIME] = step_ns
            return
        steps[_FLOOR] = max(time.monotonic_ns() + offset_ns + steps[_MONOTONIC], steps[_FLOOR])
        steps[_MONOTONIC] = step_ns


_PROTOCOLS = (0x0800, 0x0806)  # IPv4 and ARP: what hosts of a lab exchange
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15  # include/uapi/linux/if_packet.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # include/uapi/asm-generic/socket.h
_BUFFER_BYTES = 16 << 20  # more than the 50 ms that the queue of a 1 Gb/s link holds: that queue drops first
_MAX_HELD_BYTES = 256 << 20
_MAX_PACKET_BYTES = 1 << 17
_AT_ONCE = 64  # packets read before due ones are sent
_LOOK_S = 0.1
_HIGHEST_PRIORITY = -20
_DROPPED = (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.ENXIO)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """How long packets are held that cross a link in one direction.

    Attributes:
        delay_s: of each packet; a packet without delay is sent at once.
        share: which share of them is held; the others overtake those.
    """

    delay_s: float
    share: float = 1.0


class PacketSocket(Protocol):
    """What is used of a socket, which does not block."""

    def fileno(self) -> int:
        """Return its file descriptor."""

    def recv(self, size: int, /) -> bytes:
        """Return the next packet."""

    def send(self, packet: bytes, /) -> int:
        """Send a packet."""


@dataclass(frozen=True)
class _End:
    """One end: sockets that receive from a device, the first of which also sends to it."""

    sockets: tuple[PacketSocket, ...]

    def send(self, packet: bytes) -> bool:
        """Send a packet; return whether it was taken, and not dropped by a full queue or a link that is down."""
        try:
            self.sockets[0].send(packet)
        except OSError as error:
            if error.errno not in _DROPPED:
                raise
            return False
        return True


class PacketHolder:
    """Forwards between two devices; `run` forwards until it is stopped.

    Args:
        ends: sockets at both devices, as of `packet_sockets`.
        holdings: of what arrives at the first device, and of what arrives at the second.
    """

    def __init__(
        self, ends: tuple[tuple[PacketSocket, ...], tuple[PacketSocket, ...]], holdings: tuple[Holding, Holding]
    ) -> None:
        first, second = (_End(sockets) for sockets in ends)
        ways = ((first, second, holdings[0]), (second, first, holdings[1]))
        self._ways = {each: (to, holding) for of, to, holding in ways for each in of.sockets}
        self._held: list[tuple[int, int, _End, bytes]] = []
        self._held_bytes = 0
        self._count = itertools.count()
        self._random = random.Random(os.getpid())
        self.num_dropped = 0
        """Packets that no queue took."""

    def run(self, is_over: Callable[[], bool]) -> None:
        """Forward until `is_over`, which is asked ten times a second; what is held then is dropped."""
        look_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            if now_ns >= look_ns:
                if is_over():
                    return
                look_ns = now_ns + nanoseconds(_LOOK_S)
            until_ns = min(look_ns, self._held[0][0] if self._held else look_ns)
            ready, _, _ = select.select(list(self._ways), [], [], max(until_ns - now_ns, 0) / NS_PER_S)
            for each in ready:
                self._receive(each)
            self._send_due()

    def _receive(self, arriving: PacketSocket) -> None:
        to, holding = self._ways[arriving]
        for _ in range(_AT_ONCE):
            try:
                packet = arriving.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENETDOWN:
                    raise
                return
            is_held = holding.share >= 1 or self._random.random() < holding.share
            if self._held_bytes + len(packet) > _MAX_HELD_BYTES:
                self.num_dropped += 1
                continue
            due_ns = time.monotonic_ns() + (nanoseconds(holding.delay_s) if is_held else 0)
            heapq.heappush(self._held, (due_ns, next(self._count), to, packet))
            self._held_bytes += len(packet)

    def _send_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._held and self._held[0][0] <= now_ns:
            _, _, to, packet = heapq.heappop(self._held)
            self._held_bytes -= len(packet)
            self.num_dropped += not to.send(packet)


@contextmanager
def packet_sockets(device: str) -> Iterator[tuple[socket.socket, ...]]:
    """Open sockets for what arrives at a device, and close them after the block.

    They receive by protocol, and so after the device's nftables rules, which lose packets.
    """
    with ExitStack() as stack:
        found = []
        for protocol in _PROTOCOLS:
            one = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
            one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            one.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            one.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
            one.setblocking(False)
            one.bind((device, protocol))
            found.append(one)
        yield tuple(found)


def hold_packets(devices: tuple[str, str], holdings: tuple[Holding, Holding], is_over: Callable[[], bool]) -> int:
    """Forward between two devices until `is_over`; return how many packets found no place.

    Args:
        devices: names in the caller's network namespace.
        holdings: of what arrives at the first device, and of what arrives at the second.
        is_over: asked ten times a second.
    """
    # A switch does not wait for a core behind the ranks of a job.
    os.setpriority(os.PRIO_PROCESS, 0, _HIGHEST_PRIORITY)
    with packet_sockets(devices[0]) as first, packet_sockets(devices[1]) as second:
        holder = PacketHolder((first, second), holdings)
        holder.run(is_over)
    return holder.num_dropped
