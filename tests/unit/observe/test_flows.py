"""Which rows a sampler of flows writes, from readings that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcpace.observe.host.connections import Counters, Ends, FlowSampler, Reading
from hpcpace.observe.host.counters import Throttling
from hpcpace.observe.recording import CounterThread

S = 1_000_000_000


class World:
    """A recorder, a clock and connections, in one."""

    def __init__(self, most: int = 64) -> None:
        self.now_ns = 0
        self.open: dict[int, Counters] = {}
        self.connections: list[tuple[Any, ...]] = []
        self.flows: list[tuple[Any, ...]] = []
        self.sampler = FlowSampler(self, self.read, most=most, clock=lambda: self.now_ns)  # type: ignore[arg-type]

    def add_connection(self, *row: Any) -> None:
        self.connections.append(row)

    def add_flow(self, *row: Any) -> None:
        self.flows.append(row)

    def read(self) -> list[Reading]:
        return [
            Reading(inode, Ends("10.0.0.1:1", f"10.0.0.2:{inode}", "eth0"), self.now_ns + 1, counters)
            for inode, counters in self.open.items()
        ]

    def at(self, second: int, *, is_last: bool = False, **sent: int) -> list[tuple[int, int, int]]:
        """Sample at a second, with the bytes sent by `s17` and so on; return time, connection, bytes of new rows."""
        self.now_ns = second * S
        self.open = {int(name[1:]): Counters(sent_bytes=value, acked_bytes=value) for name, value in sent.items()}
        before = len(self.flows)
        self.sampler.sample(is_last=is_last)
        return [(time_ns, number, sent_bytes) for time_ns, number, sent_bytes, *_ in self.flows[before:]]


def test_a_connection_that_was_there_before_begins_with_its_counters_at_the_first_sample():
    world = World()
    assert world.at(1, s17=500) == []
    assert world.at(2, s17=700) == [(S + 1, 0, 500), (2 * S + 1, 0, 700)]
    assert world.at(3, s17=900) == [(3 * S + 1, 0, 900)]
    assert world.connections == [(0, -1, b"", b"10.0.0.1:1", b"10.0.0.2:17", b"eth0")]


def test_a_connection_that_opened_since_the_last_sample_begins_with_zeros_at_that_time():
    world = World()
    assert world.at(1) == []
    assert world.at(2, s17=700) == [(S, 0, 0), (2 * S + 1, 0, 700)]


def test_a_connection_that_carries_nothing_has_no_rows_until_it_does():
    world = World()
    world.at(1, s17=5)
    world.at(2, s17=6)
    assert world.at(3, s17=6) == world.at(4, s17=6) == []
    assert world.at(5, s17=9) == [(4 * S + 1, 0, 6), (5 * S + 1, 0, 9)]


def test_the_connections_with_the_most_bytes_have_rows_and_the_others_are_summed_up():
    world = World(most=2)
    world.at(1, s1=10, s2=30, s3=20, s4=0)
    rows = world.at(2, s1=11, s2=31, s3=21, s4=3)
    assert rows == [(S + 1, 0, 30), (2 * S + 1, 0, 31), (S + 1, 1, 20), (2 * S + 1, 1, 21), (S, -1, 0), (2 * S, -1, 4)]
    assert [row[4] for row in world.connections] == [b"10.0.0.2:2", b"10.0.0.2:3"]


def test_a_busy_connection_takes_the_place_of_one_with_half_its_bytes_and_nothing_is_counted_twice():
    world = World(most=1)
    world.at(1, s1=0, s2=0)
    world.at(2, s1=100, s2=20)
    world.at(3, s1=110, s2=300)
    assert len(world.connections) == 1
    assert world.at(4, s1=120, s2=320) == [(3 * S + 1, 1, 300), (4 * S + 1, 1, 320), (4 * S, -1, 310)]
    totals = {number: sent for _, number, sent, *_ in world.flows}
    assert totals == {0: 110, 1: 320, -1: 310}


def test_a_closed_connection_makes_room():
    world = World(most=1)
    world.at(1, s1=0, s2=0)
    world.at(2, s1=5, s2=0)
    assert world.at(3, s2=7) == [(2 * S + 1, 1, 0), (3 * S + 1, 1, 7)]


def test_many_connections_have_rows_every_few_seconds_and_at_the_end():
    world = World()
    many = {f"s{number}": 0 for number in range(1, 41)}
    world.at(1, **many)
    for second in (2, 3):
        assert world.at(second, **dict.fromkeys(many, second)) == []
    assert len(world.at(4, **dict.fromkeys(many, 4))) == 80
    for second in range(5, 14):
        assert world.at(second, **dict.fromkeys(many, second)) == []
    assert len(world.at(14, **dict.fromkeys(many, 14))) == 40
    assert len(world.at(15, **dict.fromkeys(many, 15), is_last=True)) == 40


def test_connections_that_carry_nothing_do_not_make_the_others_wait():
    world = World()
    idle = {f"s{number}": 0 for number in range(1, 15)}
    world.at(1, **idle, s77=0)
    assert [len(world.at(second, **idle, s77=second)) for second in (2, 3, 4)] == [2, 1, 1]


def test_a_program_that_opens_connections_all_the_time_gets_a_bounded_number_of_them():
    world = World(most=64)
    for second in range(1, 200):
        world.at(second * 10, **{f"s{second * 100 + number}": 1 for number in range(64)})
    assert len(world.connections) == 4096
    assert max(sent for _, number, sent, *_ in world.flows if number == -1) > 0


class _Host:
    throttling = Throttling(proc=Path("/nowhere"), cgroup=Path("/nowhere"))

    def read(self) -> tuple[int, ...]:
        return ()


class _Recorder:
    def __init__(self) -> None:
        self.num_hosts = 0

    def add_host(self, *_: int) -> None:
        self.num_hosts += 1


def test_where_connections_cannot_be_read_the_other_counters_go_on():
    recorder, warnings = _Recorder(), list[str]()

    def refuse() -> list[Reading]:
        raise PermissionError(13, "Permission denied", "/proc/self/fd")

    sampler = FlowSampler(recorder, refuse, most=64)  # type: ignore[arg-type]
    thread = CounterThread(recorder, _Host(), None, sampler, warn=warnings.append)  # type: ignore[arg-type]
    thread.sample()
    thread.sample()
    assert recorder.num_hosts == 2
    assert warnings == ["connections are not recorded from here on: [Errno 13] Permission denied: '/proc/self/fd'"]
