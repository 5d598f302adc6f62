from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import ClockSyncError
from hpcpace.core.text import NS_PER_S
from hpcpace.world.clock import ClockSync, Standing, SyncTree

HOUR_NS = 3600 * NS_PER_S
DEAD = None
Delay = Callable[[np.random.Generator, int, int], float]


def noisy_and_asymmetric(rng, sender, receiver):
    """5 us one way, 7 us the other, with an exponential tail."""
    return (5_000 if sender < receiver else 7_000) + rng.exponential(2_000)


@dataclass
class Host:
    """A rank with its own clock, at a known true time."""

    offset_ns: int = 0
    drift_ppm: float = 0.0
    wander_ppm: float = 0.0
    time_ns: float = 0.0

    def error_ns(self, true_ns: float) -> float:
        # The rate wanders by wander_ppm up and down within 600 s.
        period_ns = 600 * NS_PER_S / (2 * np.pi)
        wander_ns = self.wander_ppm * 1e-6 * period_ns * np.sin(true_ns / period_ns)
        return self.offset_ns + self.drift_ppm * 1e-6 * true_ns + wander_ns

    def read(self) -> int:
        self.time_ns += 50
        return round(self.time_ns + self.error_ns(self.time_ns))


@dataclass
class Network:
    """Ranks as threads; messages carry their true time of arrival, so that no thread waits for real time."""

    hosts: list[Host]
    delay: Delay = noisy_and_asymmetric
    queues: dict[tuple[int, int], queue.SimpleQueue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(len(self.hosts))
        self.queues = {(a, b): queue.SimpleQueue() for a in ranks for b in ranks}
        self.rngs = [np.random.default_rng(rank) for rank in ranks]

    def run(self, program: Callable[[int, Link], object]) -> list[object]:
        """Run the program on every rank and return what each one returned or raised."""
        results: list[object] = [None] * len(self.hosts)

        def body(rank: int) -> None:
            try:
                results[rank] = program(rank, Link(self, rank))
            except ClockSyncError as error:
                results[rank] = error
            finally:
                for peer in range(len(self.hosts)):
                    self.queues[rank, peer].put(DEAD)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return results


@dataclass
class Link:
    """The transport of one rank in a Network."""

    network: Network
    rank: int

    def send(self, peer: int, values: tuple[int, ...], timeout_s: float) -> None:
        host = self.network.hosts[self.rank]
        host.time_ns += 300
        arrival_ns = host.time_ns + self.network.delay(self.network.rngs[self.rank], self.rank, peer)
        self.network.queues[self.rank, peer].put((arrival_ns, values))

    def recv(self, peer: int, timeout_s: float) -> tuple[int, ...]:
        host = self.network.hosts[self.rank]
        message = self.network.queues[peer, self.rank].get(timeout=60)
        if message is DEAD or message[0] > host.time_ns + timeout_s * NS_PER_S:
            host.time_ns += timeout_s * NS_PER_S
            raise ClockSyncError(f"rank {peer} sent no message")
        host.time_ns = max(host.time_ns, message[0])
        return message[1]

    def close(self) -> None:
        pass


def set_clocks(num_ranks: int) -> list[Host]:
    return [
        Host(offset_ns=(-1) ** rank * rank * 3 * HOUR_NS, drift_ppm=100.0 * (-1) ** rank * (rank > 0), wander_ppm=0.5)
        for rank in range(num_ranks)
    ]


def host_names(num_ranks: int) -> list[str]:
    return [f"host{rank}" for rank in range(num_ranks)]


def synchronise(network: Network, num_syncs: int, keys: list[str] | None = None):
    """Return samples and their true offsets, both (num_ranks, num_syncs)."""
    hosts = network.hosts

    def program(rank: int, link: Link):
        sync = ClockSync(link, rank, keys or host_names(len(hosts)), clock=hosts[rank].read)
        samples, truths = [], []
        for number in range(num_syncs):
            hosts[rank].time_ns = max(hosts[rank].time_ns, number * 30.0 * NS_PER_S)
            sample = sync.sync()
            true_ns = sample.local_ns - hosts[rank].offset_ns
            for _ in range(4):
                true_ns = sample.local_ns - hosts[rank].error_ns(true_ns)
            samples.append(sample)
            truths.append(hosts[rank].error_ns(true_ns) - hosts[0].error_ns(true_ns))
        return samples, truths

    return list(zip(*network.run(program), strict=True))


@each_case("num_ranks", [1, 2, 3, 4, 5, 8])
def test_the_true_offset_lies_within_the_halfwidth(num_ranks):
    samples, truths = synchronise(Network(set_clocks(num_ranks)), num_syncs=30)
    errors = np.array(
        [[abs(s.offset_ns - t) for s, t in zip(*pair, strict=True)] for pair in zip(samples, truths, strict=True)]
    )
    widths = np.array([[s.halfwidth_ns for s in row] for row in samples])
    assert np.mean(errors <= widths) >= 0.99
    # and the half-width is no wider than the network makes it: one edge of the tree or three
    assert widths.max() < 3 * 15_000


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_the_median_halfwidth_is_half_of_the_median_round_trip(num_ranks):
    samples, _ = synchronise(Network(set_clocks(num_ranks)), num_syncs=30)
    measured = [sample for row in samples[1:] for sample in row]
    assert np.median([s.halfwidth_ns for s in measured]) <= 0.6 * np.median([s.rtt_ns for s in measured])


def test_a_late_message_does_not_widen_the_sample():
    late = iter([10_000_000])

    def one_outlier(rng, sender, receiver):
        return noisy_and_asymmetric(rng, sender, receiver) + (next(late, 0) if receiver == 0 else 0)

    samples, truths = synchronise(Network(set_clocks(2), one_outlier), num_syncs=1)
    assert samples[1][0].halfwidth_ns < 15_000
    assert abs(samples[1][0].offset_ns - truths[1][0]) <= samples[1][0].halfwidth_ns


@dataclass
class SetBack(Host):
    """A clock that is set back by 50 ms when it is read for the eleventh time, within a round trip."""

    num_reads: int = 0

    def read(self) -> int:
        self.num_reads += 1
        self.offset_ns -= 50_000_000 * (self.num_reads == 11)
        return super().read()


def test_a_round_trip_in_which_the_clock_is_set_back_does_not_count():
    host = SetBack()
    samples, _ = synchronise(Network([Host(), host]), num_syncs=1)
    sample = samples[1][0]
    assert host.num_reads > 20 and 0 < sample.halfwidth_ns < 15_000
    assert min(abs(sample.offset_ns), abs(sample.offset_ns + 50_000_000)) <= sample.halfwidth_ns


@dataclass
class StandsStill(Host):
    """A clock that is set back by 0.5 ms after 0.1 ms, and shows the same time until it is due again."""

    def error_ns(self, true_ns: float) -> float:
        return max(min(100_000 - true_ns, 0), -500_000)


def test_round_trips_in_which_the_clock_stands_still_do_not_count():
    samples, _ = synchronise(Network([Host(), StandsStill()]), num_syncs=1)
    sample = samples[1][0]
    assert sample.num_pings > 20 and 0 < sample.halfwidth_ns < 15_000
    assert abs(sample.offset_ns + 500_000) <= sample.halfwidth_ns


def test_the_reference_has_offset_0_for_certain():
    samples, _ = synchronise(Network(set_clocks(2)), num_syncs=1)
    assert (samples[0][0].offset_ns, samples[0][0].halfwidth_ns, samples[0][0].num_pings) == (0, 0, 0)


def test_ranks_of_one_host_share_the_sample_of_their_leader():
    clocks = set_clocks(2)
    hosts = [clocks[0], clocks[0], clocks[1], clocks[1], clocks[1]]
    network = Network([Host(h.offset_ns, h.drift_ppm, h.wander_ppm) for h in hosts])
    samples, truths = synchronise(network, num_syncs=2, keys=["a", "a", "b", "b", "b"])
    assert samples[1] == samples[0]
    assert samples[2] == samples[3] == samples[4]
    assert abs(samples[2][1].offset_ns - truths[2][1]) <= samples[2][1].halfwidth_ns


@each_case("dead", [0, 1, 2, 3, 7])
def test_a_rank_that_dies_in_a_synchronisation_leaves_no_one_hanging(dead):
    network = Network(set_clocks(8))

    def program(rank: int, link: Link):
        sync = ClockSync(link, rank, host_names(8), clock=network.hosts[rank].read, timeout_s=5)
        sync.sync()
        if rank == dead:
            sync._send(SyncTree.of(rank, host_names(8)).parent or 1)
            return "dead"
        with pytest.raises(ClockSyncError):
            sync.sync()
        with pytest.raises(ClockSyncError, match="earlier synchronisation failed"):
            sync.sync()
        return sync.broken

    assert network.run(program) == ["dead" if rank == dead else True for rank in range(8)]


def agreements(standings: list[list[Standing]], *, pause_s: float = 0.0, interval_s: float = 30.0):
    """Return the agreements of every rank after each synchronisation, to which rank r comes as standings[i][r] say."""
    network = Network(set_clocks(len(standings[0])))

    def program(rank: int, link: Link):
        host = network.hosts[rank]
        sync = ClockSync(link, rank, host_names(len(standings[0])), clock=host.read, interval_s=interval_s)
        found = []
        for standing in standings:
            sync.sync(standing[rank])
            found.append(sync.agreement)
            host.time_ns += pause_s * NS_PER_S
        return found

    results = network.run(program)
    assert results == [results[0]] * len(results), "all ranks know the same"
    return results[0]


def test_all_ranks_agree_on_the_time_of_the_next_synchronisation():
    found = agreements([[Standing()] * 4] * 12)
    pauses_s = np.diff([agreement.next_ns for agreement in found]) / NS_PER_S
    assert np.allclose(pauses_s, [0.5, 1, 2, 4, 8, 14, 0, 0, 0, 0, 0], atol=0.01)


def test_the_step_to_agree_on_is_ahead_of_every_rank_by_a_second():
    quick, slow = 10 * NS_PER_S // 1000, 60 * NS_PER_S
    found = agreements(
        [
            [Standing(3), Standing(7)],  # nobody knows how long a step takes
            [Standing(20, quick, notice=(1, 2, 3, 4)), Standing(25, slow, notice=(9, 9, 9, 9))],
            [Standing(124, quick, notice=(5, 6, 7, 8)), Standing(90, quick)],  # rank 1 has still to come to step 125
            [Standing(125, slow, notice=(5, 6, 7, 8)), Standing(130, slow)],
        ]
    )
    assert [(agreement.step, agreement.notice) for agreement in found[1:]] == [
        (125, (1, 2, 3, 4)),
        (125, (1, 2, 3, 4)),
        (132, (5, 6, 7, 8)),
    ]
    assert found[0].step == 0


def test_the_last_synchronisation_is_the_one_in_which_all_ranks_leave():
    found = agreements(
        [[Standing(leaves=rank in leaving) for rank in range(5)] for leaving in ([], [4], [1, 2, 3, 4], range(5))]
    )
    assert [agreement.all_leave for agreement in found] == [False, False, False, True]


def test_pings_go_on_where_all_round_trips_are_long():
    slow = iter([0] * 40 + [5_000_000] * 60)

    def lengthened(rng, sender, receiver):
        return noisy_and_asymmetric(rng, sender, receiver) + (next(slow, 0) if receiver == 0 else 0)

    samples, truths = synchronise(Network(set_clocks(2), lengthened), num_syncs=4)
    counts = [sample.num_pings for sample in samples[1]]
    assert max(counts) > 20
    assert counts[0] == counts[-1] == 20
    assert max(sample.halfwidth_ns for sample in samples[1]) < 60_000
    assert all(abs(s.offset_ns - t) <= s.halfwidth_ns for s, t in zip(samples[1], truths[1], strict=True))


@each_case("num_hosts", [1, 2, 3, 4, 5, 8, 100])
def test_the_tree_reaches_every_host_in_logarithmic_rounds(num_hosts):
    trees = [SyncTree.of(rank, host_names(num_hosts)) for rank in range(num_hosts)]
    told = sorted(child for tree in trees for child in tree.children)
    assert told == list(range(1, num_hosts))
    depths = {0: 0}
    for rank in range(1, num_hosts):
        assert rank in trees[trees[rank].parent].children
        depths[rank] = depths[trees[rank].parent] + 1
    assert max(depths.values()) <= (num_hosts - 1).bit_length()
    assert max(len(tree.children) for tree in trees) <= (num_hosts - 1).bit_length()


def test_a_world_of_several_needs_a_transport():
    with pytest.raises(ValueError, match="2 ranks needs a transport"):
        ClockSync(None, 0, ["a", "b"])
