from __future__ import annotations

from time import thread_time_ns
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.train.inject import InjectedFault, Injector, parse_fault, spin


class FakeTime:
    """A clock that only work and sleep move; each sleep takes longer than asked."""

    def __init__(self, overshoot_ns: int = 0) -> None:
        self.now_ns = 0
        self.slept_ns = 0
        self._overshoot_ns = overshoot_ns

    def clock(self) -> int:
        return self.now_ns

    def sleep(self, duration_s: float) -> None:
        duration_ns = round(duration_s * NS_PER_S) + self._overshoot_ns
        self.now_ns += duration_ns
        self.slept_ns += duration_ns


def _injector(spec: str, time: FakeTime, rank: int = 2) -> Injector:
    fault = parse_fault(spec)
    return Injector([fault], seed=0, rank=rank, host="n3.cluster", clock=time.clock, spend=time.sleep, sleep=time.sleep)


def _work(injector: Injector, time: FakeTime, phase: str, duration_ns: int) -> None:
    with injector.slowed(phase):
        time.now_ns += duration_ns


@each_case(
    ("spec", "fault"),
    [
        ("rank=2,phase=forward,size=30%", InjectedFault(rank=2, phases=("forward",), share=0.3)),
        ("host=n3,size=20ms", InjectedFault(host="n3", phases=("forward", "backward"), pause_ns=20 * NS_PER_MS)),
        (
            " rank = 0, phase=data,size=1.5s,kind=random,p=0.2",
            InjectedFault(rank=0, phases=("data",), pause_ns=1500 * NS_PER_MS, kind="random", probability=0.2),
        ),
        (
            "rank=1,phase=compute,size=5%,kind=periodic,period=7",
            InjectedFault(rank=1, phases=("forward", "backward"), share=0.05, kind="periodic", period=7),
        ),
    ],
)
def test_reads_a_fault(spec: str, fault: InjectedFault) -> None:
    assert parse_fault(spec) == fault


@each_case(
    ("spec", "seen"),
    [
        ("", "cannot read ''"),
        ("rank=2", "size ''"),
        ("size=30%", "exactly one of rank and host"),
        ("rank=2,host=n3,size=30%", "exactly one of rank and host"),
        ("rank=two,size=30%", "'two'"),
        ("rank=-1,size=30%", "rank must be 0 or more"),
        ("rank=2,size=30", "'30'"),
        ("rank=2,size=-30%", "-30%"),
        ("rank=2,size=nan%", "nan%"),
        ("rank=2,size=inf%", "inf%"),
        ("rank=2,size=30%,phase=sleep", "'sleep'"),
        ("rank=2,size=30%,kind=often", "'often'"),
        ("rank=2,size=30%,p=0.5", "p belongs to"),
        ("rank=2,size=30%,kind=random,p=2", "at most 1"),
        ("rank=2,size=30%,kind=periodic,period=0", "period 1 or more"),
        ("rank=2,rank=3,size=30%", "rank is given twice"),
        ("rank=2,speed=3", "'speed=3'"),
    ],
)
def test_tells_the_grammar_when_a_fault_cannot_be_read(spec: str, seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(spec)
    assert seen in str(caught.value)
    assert "like rank=2,phase=forward,size=30%" in str(caught.value)


def test_a_share_is_added_to_the_phases_own_time() -> None:
    time = FakeTime()
    injector = _injector("rank=2,phase=forward,size=30%", time)
    injector.begin_step(0)
    for _ in range(10):
        _work(injector, time, "forward", NS_PER_MS)
        _work(injector, time, "backward", 5 * NS_PER_MS)
    assert time.slept_ns == 3 * NS_PER_MS


def test_delays_that_take_too_long_even_out() -> None:
    time = FakeTime(overshoot_ns=60_000)
    injector = _injector("rank=2,phase=forward,size=10%", time)
    injector.begin_step(0)
    for _ in range(1000):
        _work(injector, time, "forward", NS_PER_MS)
    assert time.slept_ns == pytest.approx(100 * NS_PER_MS, abs=160_000)


def test_a_pause_comes_once_a_step() -> None:
    time = FakeTime()
    injector = _injector("rank=2,size=20ms", time)
    for step in range(3):
        injector.begin_step(step)
        for phase in ("forward", "forward", "backward"):
            _work(injector, time, phase, NS_PER_MS)
    assert time.slept_ns == 60 * NS_PER_MS


def test_spinning_uses_processor_time() -> None:
    before_ns = thread_time_ns()
    spin(0.002)
    assert thread_time_ns() - before_ns >= 2 * NS_PER_MS


def test_a_periodic_fault_acts_once_a_period() -> None:
    fault = parse_fault("rank=2,size=20ms,kind=periodic,period=4")
    assert [step for step in range(12) if fault.acts(step, seed=0, rank=2)] == [3, 7, 11]


def test_a_random_fault_follows_from_the_seed() -> None:
    fault = parse_fault("host=n3,size=20ms,kind=random,p=0.25")
    steps = [fault.acts(step, seed=1, rank=2) for step in range(2000)]
    assert steps == [fault.acts(step, seed=1, rank=2) for step in range(2000)]
    assert steps != [fault.acts(step, seed=1, rank=3) for step in range(2000)]
    assert 400 < sum(steps) < 600


def test_other_ranks_are_not_slowed() -> None:
    time = FakeTime()
    injector = _injector("rank=2,size=30%", time, rank=1)
    injector.begin_step(0)
    _work(injector, time, "forward", NS_PER_MS)
    assert time.slept_ns == 0


@each_case(("host", "is_slowed"), [("n3", True), ("n3.cluster", True), ("n33", False), ("n", False)])
def test_a_host_is_slowed_by_its_name(host: str, is_slowed: bool) -> None:
    assert parse_fault(f"host={host},size=30%").concerns(0, "n3.cluster") is is_slowed


def test_hooks_slow_forward_and_backward_of_a_module() -> None:
    torch = pytest.importorskip("torch")

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            time.now_ns += 10 * NS_PER_MS
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.now_ns += 20 * NS_PER_MS
            return gradient * 2

    class Piece(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            return Work.apply(value)

    time, piece = FakeTime(), Piece()
    injector = _injector("rank=2,phase=compute,size=50%", time)
    injector.attach([piece])
    injector.begin_step(0)
    value = torch.ones(1, requires_grad=True)
    piece(value).backward()
    assert time.slept_ns == 15 * NS_PER_MS
    assert value.grad.item() == 2
