from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from cases import each_case

torch = pytest.importorskip("torch")

from hpcpace.train.loop import EarlySignal, StopVote  # noqa: E402


class Done:
    def wait(self) -> None:
        pass


class Others:
    """Stands in for a group of two ranks, of which the other one votes as it is told and takes as long."""

    def __init__(self, wishes: tuple[bool, ...] = ()) -> None:
        self.num_votes = 0
        self._wishes = iter(wishes)

    def _get_backend(self, _: object) -> Others:
        return self

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list) -> Done:
        self.num_votes += 1
        tensors[0] *= torch.tensor([1.0, 2.0])
        tensors[0] += torch.tensor([float(next(self._wishes, False)), 0.0])
        return Done()


def _clock(step_ns: int) -> Iterator[int]:
    now_ns = 0
    while True:
        yield now_ns
        now_ns += step_ns


def test_a_signal_is_noted_and_ends_nothing() -> None:
    early = EarlySignal()
    before = signal.getsignal(signal.SIGUSR1)
    with early.listening(signal.SIGUSR1):
        assert early.name == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert early.name == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_first_signal_counts() -> None:
    early = EarlySignal()
    with early.listening(signal.SIGUSR1), early.listening(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert early.name == "SIGTERM"


def test_a_rank_alone_stops_at_once() -> None:
    vote = StopVote(None)
    assert [vote.stops(False), vote.stops(True)] == [False, True]


@pytest.mark.parametrize(("own", "other"), [(True, False), (False, True)])
def test_all_stop_where_one_wants_to_when_the_next_vote_begins(own: bool, other: bool) -> None:
    clock = _clock(2_000_000_000)
    vote = StopVote(Others((other,)), clock=lambda: next(clock))
    assert [vote.stops(own), vote.stops(False)] == [False, True]


def test_nobody_stops_where_nobody_wants_to() -> None:
    clock = _clock(2_000_000_000)
    vote = StopVote(Others(), clock=lambda: next(clock))
    assert not any(vote.stops(False) for _ in range(10))


@each_case(("step_s", "num_votes"), [(5.0, 100), (1.0, 100), (0.001, 2)])
def test_votes_are_about_a_second_apart(step_s: float, num_votes: int) -> None:
    now_ns = 0
    others = Others()
    vote = StopVote(others, clock=lambda: now_ns)
    for _ in range(100):
        now_ns += round(step_s * 1e9)
        vote.stops(False)
    assert others.num_votes == num_votes
