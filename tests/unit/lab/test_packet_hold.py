"""Packets that cross a link by way of a process: all arrive, after their time, in order or not."""

from __future__ import annotations

import errno
import itertools
import socket
import time

from hpcpace.lab.emulated import Holding, PacketHolder

NOTHING = Holding(delay_s=0.0)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket of the holder and its other end, which keep packets apart as packet sockets do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    ours.setblocking(False)
    theirs.settimeout(5.0)
    return ours, theirs


def forwarded(up: Holding, down: Holding, num_packets: int) -> tuple[list[int], list[int], float]:
    """Send packets both ways and return their numbers as they arrive above and below, and how long it took."""
    (low, below), (high, above) = pair(), pair()
    with low, below, high, above:
        for number in range(num_packets):
            below.send(number.to_bytes(4, "big"))
            above.send(number.to_bytes(4, "big"))
        looks = itertools.count()
        begin_s = time.monotonic()
        PacketHolder(((low,), (high,)), (up, down)).run(lambda: next(looks) >= 3)
        took_s = time.monotonic() - begin_s
        above.setblocking(False)
        below.setblocking(False)
        return received(above), received(below), took_s


def received(end: socket.socket) -> list[int]:
    found = []
    try:
        while packet := end.recv(100):
            found.append(int.from_bytes(packet, "big"))
    except BlockingIOError:
        pass
    return found


def test_all_packets_arrive_in_order_where_all_are_held_for_the_same_time():
    above, below, _ = forwarded(Holding(delay_s=0.05), NOTHING, 60)
    assert above == below == list(range(60))


def test_a_held_packet_does_not_arrive_before_its_time():
    above, below, took_s = forwarded(Holding(delay_s=10.0), Holding(delay_s=0.0), 3)
    assert (above, below) == ([], [0, 1, 2])
    assert took_s < 5.0


def test_others_overtake_the_packets_that_are_held():
    above, below, _ = forwarded(Holding(delay_s=0.02, share=0.3), NOTHING, 60)
    assert sorted(above) == list(range(60)) and above != sorted(above)
    late = [number for number, next_ in itertools.pairwise(above) if next_ < number]
    assert late and below == list(range(60))


def test_what_a_full_queue_or_a_dead_link_does_not_take_is_dropped_and_counted():
    class Full:
        """A socket that takes nothing, as one in front of a full queue."""

        def __init__(self, of: socket.socket, code: int) -> None:
            self._of, self._code = of, code

        def fileno(self) -> int:
            return self._of.fileno()

        def recv(self, size: int) -> bytes:
            return self._of.recv(size)

        def send(self, packet: bytes) -> int:
            raise OSError(self._code, "not now")

    for code in (errno.ENOBUFS, errno.ENETDOWN):
        (low, below), (high, above) = pair(), pair()
        with low, below, high, above:
            for _ in range(5):
                below.send(b"packet")
            looks = itertools.count()
            holder = PacketHolder(((low,), (Full(high, code),)), (NOTHING, NOTHING))
            holder.run(lambda looks=looks: next(looks) >= 2)
            assert holder.num_dropped == 5
