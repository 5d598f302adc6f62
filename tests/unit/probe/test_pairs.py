"""Pairs of hosts measured over sockets of this machine, each rank a thread with a world of its own."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcpace.core.errors import HpcpaceError
from hpcpace.probe.pair_player import RoundTimes, connect_to
from hpcpace.probe.pairs import Pairs
from hpcpace.probe.record import ProbedHost, ProbeRecord
from hpcpace.probe.world import Board, ProbeWorld
from hpcpace.world.deadline import Deadline
from hpcpace.world.interfaces import HostAddresses
from tests.unit.probe.empty_record import empty_record

_TIMEOUT_S = 8.0
_TIMES = RoundTimes(set_up_s=0.02, latency_s=0.01, pause_s=0.01, rate_s=0.03)


def _addresses(host: str, address: str) -> Callable[[str], HostAddresses]:
    return lambda _: HostAddresses(host=host, addresses={"eth0": address}, speed_mbps={})


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.probe.world.GRACE_S", 0.5)


def _record(hosts: tuple[str, ...]) -> ProbeRecord:
    probed = tuple(
        ProbedHost(
            name=name, topology_addr="", ranks=(), interfaces=("eth0",), line_rate=None, pcie_rate=None, rate_words=""
        )
        for name in hosts
    )
    return empty_record(hosts=probed)


class Cluster:
    """Hosts whose ranks are threads of this process.

    Args:
        ranks_per_host: number of ranks of each host.
        addresses: of each host; loopback ones.
        timeout_s: of the world.
    """

    def __init__(self, ranks_per_host: list[int], addresses: list[str], timeout_s: float = _TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.hosts = tuple(f"n{number + 1}" for number in range(len(ranks_per_host)))
        self.addresses = addresses
        self.node_of_rank = tuple(host for host, num in enumerate(ranks_per_host) for _ in range(num))
        self.store = dist.HashStore()
        self.records: dict[int, ProbeRecord] = {}
        self.worlds: dict[int, ProbeWorld] = {}

    def probe(self, *, silent: tuple[int, ...] = (), part: Callable[[Any], Any] | None = None) -> ProbeRecord:
        """Measure pairs on all ranks and return rank 0's record; silent ranks stop when the first round begins."""
        threads = [threading.Thread(target=self._rank, args=(rank, silent)) for rank in range(len(self.node_of_rank))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.records[0]

    def _rank(self, rank: int, silent: tuple[int, ...]) -> None:
        node = self.node_of_rank[rank]
        world = ProbeWorld(
            rank=rank,
            node_of_rank=self.node_of_rank,
            hosts=self.hosts,
            topology_addrs=tuple("" for _ in self.hosts),
            device=torch.device("cpu"),
            backend="gloo",
            board=Board(self.store),
            timeout_s=self.timeout_s,
        )
        self.worlds[rank] = world
        part = Pairs(times=_TIMES, own_addresses=_addresses(self.hosts[node], self.addresses[node]))
        if rank in silent:
            world.agree = _stops_at_the_first_round(world.agree)  # type: ignore[method-assign]
        try:
            self.records[rank] = part.measure(world, Deadline(8.0), _record(self.hosts))
        except HpcpaceError:
            assert rank in silent


def _stops_at_the_first_round(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Return `agree` of a rank that is heard of no more once seats are known."""
    calls = iter(range(2))

    def stopping(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise HpcpaceError("this rank has stopped")
        return agree(*arguments)

    return stopping


def _ends(record: ProbeRecord) -> set[frozenset[str]]:
    assert record.pairs is not None
    return {frozenset((row.first, row.second)) for row in record.pairs.rows if row.forward and row.backward}


@pytest.mark.parametrize(
    ("ranks_per_host", "addresses"),
    [
        ([1, 1, 1], ["127.0.0.1", "127.0.0.2", "127.0.0.3"]),
        ([2, 1, 3], ["127.0.0.1", "127.0.0.2", "127.0.0.3"]),
        ([1, 1], ["::1", "::1"]),
    ],
    ids=["a rank on each host", "unequal ranks", "IPv6 only"],
)
def test_all_pairs_are_measured_both_ways(ranks_per_host: list[int], addresses: list[str]) -> None:
    record = Cluster(ranks_per_host, addresses).probe()
    pairs = record.pairs
    assert pairs is not None
    num_hosts = len(ranks_per_host)
    assert len(_ends(record)) == num_hosts * (num_hosts - 1) // 2
    assert all(0 < (row.least_ns or math.nan) <= (row.p50_ns or 0) <= (row.p99_ns or 0) for row in pairs.rows)
    assert pairs.carrier == "TCP over eth0"
    assert pairs.usual is not None
    assert pairs.usual > 0
    assert record.problems == ()


def test_one_host_has_nothing_to_measure_and_says_so() -> None:
    record = Cluster([2], ["127.0.0.1"]).probe()
    assert record.pairs is not None
    assert record.pairs.rows == ()
    assert record.pairs.note == "all ranks are on n1: pairs take at least two hosts"


def test_two_hosts_say_that_there_is_nothing_to_compare_with() -> None:
    record = Cluster([1, 1], ["127.0.0.1", "127.0.0.2"]).probe()
    assert record.pairs is not None
    assert record.pairs.note.startswith("two hosts are one pair")


def test_a_host_that_stops_answering_is_named_and_the_others_are_measured() -> None:
    cluster = Cluster([1, 1, 1, 1], ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"], timeout_s=2.0)
    record = cluster.probe(silent=(2,))
    assert cluster.worlds[0].lost_hosts == ["n3"]
    assert any(text.startswith("n3 stopped answering during pairs of hosts") for text in cluster.worlds[0].problems)
    assert _ends(record) == {frozenset(("n1", "n2")), frozenset(("n1", "n4")), frozenset(("n2", "n4"))}


def test_hosts_without_a_route_to_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, port: int, name: str, secret: str, timeout_s: float) -> socket.socket:
        rank_that_connects = name.split()[1]
        if address == "127.0.0.3" or rank_that_connects == "2":
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return connect_to(address, port, name, secret, timeout_s)

    monkeypatch.setattr("hpcpace.probe.pair_player.connect_to", connect)
    cluster = Cluster([1, 1, 1], ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    record = cluster.probe()
    assert _ends(record) == {frozenset(("n1", "n2"))}
    assert record.pairs is not None
    assert {row.problem for row in record.pairs.rows if row.problem} == {
        "n1: cannot connect to n3 at 127.0.0.3: No route to host",
        "n2: cannot connect to n3 at 127.0.0.3: No route to host",
    }
