"""The simulated job against closed forms, and its couplings one by one."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from library.simulation import (
    KINDS,
    Incast,
    ParametricNoise,
    PollStealing,
    PowerShare,
    ResampledNoise,
    SimulatedJob,
    TracedNoise,
    shared_ready_ns,
    simulate,
)


class Delays:
    """Delays that are known before."""

    def __init__(self, delays):
        self.delays = np.asarray(delays, np.float64)
        self.step = 0

    def start(self, num_ranks):
        self.step = 0

    def delay_ns(self, work_ns):
        return self.delays[:, self.step]

    def learn(self, ready_ns, delay_ns, exit_ns):
        self.step += 1


def test_without_noise_a_step_is_the_longest_work_and_the_transfer():
    found = simulate(SimulatedJob(num_ranks=3, num_steps=4, work_ns=np.array([5.0, 7.0, 6.0]), transfer_ns=2.0))
    assert found.step_ns.tolist() == [9.0] * 4
    assert found.ready_ns.tolist() == [[5.0, 14.0, 23.0, 32.0], [7.0, 16.0, 25.0, 34.0], [6.0, 15.0, 24.0, 33.0]]
    assert (found.cv, found.mean_step_ns) == (0.0, 9.0)
    assert not found.delay_ns.any()


def test_independent_exponential_noise_costs_its_expected_maximum():
    noise = ParametricNoise(kind="exponential", size_ns=10.0)
    found = simulate(SimulatedJob(num_ranks=64, num_steps=20_000, work_ns=100.0, noise=noise))
    expected = 100 + 10 * (1 / np.arange(1, 65)).sum()
    assert found.mean_step_ns == pytest.approx(expected, abs=4 * found.step_ns.std() / 20_000**0.5)


@each_case("kind", KINDS)
def test_coscheduled_noise_costs_what_one_rank_has_of_it(kind):
    noise = ParametricNoise(kind=kind, size_ns=10.0, is_coscheduled=True)
    many = simulate(SimulatedJob(num_ranks=64, num_steps=200, work_ns=100.0, noise=noise))
    assert (many.ready_ns == many.ready_ns[0]).all()


def test_rare_events_of_many_ranks_strike_most_steps():
    noise = ParametricNoise(kind="rare", size_ns=10.0, probability=0.02)
    found = simulate(SimulatedJob(num_ranks=100, num_steps=20_000, work_ns=100.0, noise=noise))
    assert found.mean_step_ns == pytest.approx(100 + 10 * (1 - 0.98**100), abs=0.1)


def test_periodic_noise_strikes_each_rank_once_a_period():
    noise = ParametricNoise(kind="periodic", size_ns=10.0, period=20)
    drawn = noise.draw(50, 200, np.random.default_rng(0))
    assert (drawn.sum(axis=0) == 100.0).all()
    assert len(set(drawn.argmax(axis=0))) > 10


@pytest.mark.parametrize("is_coscheduled", [False, True])
def test_measured_residuals_are_dealt_out_in_stretches(is_coscheduled):
    residual = np.arange(2 * 12.0).reshape(2, 12)
    noise = ResampledNoise(residual_ns=residual, length=4, is_coscheduled=is_coscheduled)
    drawn = noise.draw(300, 10, np.random.default_rng(0))
    assert drawn.shape == (10, 300)
    assert set(drawn.ravel()) <= set(residual.ravel())
    within = np.diff(drawn, axis=0)[np.arange(9) % 4 != 3]
    assert (within == 1.0).all()
    assert (drawn == drawn[:, :1]).all() == is_coscheduled


def test_work_ends_behind_the_detours_of_a_trace():
    noise = TracedNoise(begin_ns=np.array([10.0, 50.0]), duration_ns=np.array([5.0, 20.0]), period_ns=100.0)
    begin = np.array([0.0, 0.0, 0.0, 12.0, 60.0, 240.0, 0.0])
    work = np.array([9.0, 20.0, 40.0, 1.0, 30.0, 20.0, 150.0])
    # Free of detours are 75 of 100: the last work is two whole periods.
    expected = [9.0, 25.0, 45.0, 16.0, 100.0, 280.0, 200.0]
    assert noise.end_ns(begin, work).tolist() == pytest.approx(expected)


def test_a_trace_of_noise_costs_less_where_all_ranks_have_it_together():
    def mean(is_coscheduled):
        noise = TracedNoise(
            begin_ns=np.array([3e5]), duration_ns=np.array([2e5]), period_ns=1.1e7, is_coscheduled=is_coscheduled
        )
        return simulate(SimulatedJob(num_ranks=32, num_steps=2_000, work_ns=1e6, noise=noise)).mean_step_ns

    # Together: 2e5 in each period of the trace. Apart, a step meets one with the probability that follows.
    assert mean(True) == pytest.approx(1e6 / (1 - 2e5 / 1.1e7), rel=0.01)
    assert mean(False) > 1.1e6


@each_case(
    ("weight", "delay", "expected"),
    [(1.0, 0.0, 200.0), (0.0, 0.0, 140.0), (1.0, 1e9, 140.0), (1.0, 30.0, 170.0), (0.5, 0.0, 80 + 60 * 1.5)],
)
def test_a_polling_rank_takes_its_share_of_a_core(weight, delay, expected):
    # Together on one core: 40 and 100 of work. Until 80 both compute; 60 are left of the later.
    poll = PollStealing(ranks_per_node=2, cores_per_node=1.0, weight=weight)
    ready = shared_ready_ns(np.array([[40.0, 100.0]]), lambda ready: np.array([[delay, 0.0]]), poll=poll, power=None)
    assert ready.tolist() == [[80.0, pytest.approx(expected)]]


def test_polling_takes_nothing_where_each_rank_has_a_core():
    poll = PollStealing(ranks_per_node=4, cores_per_node=4.0)
    work = np.random.default_rng(0).random((5, 4)) * 100
    ready = shared_ready_ns(work, np.zeros_like, poll=poll, power=None)
    assert ready == pytest.approx(work)


@each_case(("delay", "expected"), [(0.0, 100.0), (1e9, 40 + 60 / 1.25), (25.0, 93.75)])
def test_a_sleeping_rank_leaves_power(delay, expected):
    power = PowerShare(ranks_per_node=2, boost=0.25)
    ready = shared_ready_ns(np.array([[40.0, 100.0]]), lambda ready: np.array([[delay, 0.0]]), poll=None, power=power)
    assert ready.tolist() == [[40.0, pytest.approx(expected)]]


def test_a_link_that_loses_nothing_is_done_with_its_last_busy_period():
    link = Incast(message_ns=10.0)
    assert link.end_ns(np.array([0.0, 0.0, 0.0])) == 30.0
    assert link.end_ns(np.array([100.0, 0.0, 5.0])) == 110.0
    assert link.end_ns(np.array([15.0, 0.0, 5.0])) == 30.0


def test_the_shared_link_agrees_with_the_recursion_as_the_collapse_goes_to_nothing():
    entry = np.random.default_rng(3).random(40) * 300
    nearly = Incast(message_ns=10.0, collapse=1e-12)
    assert nearly.end_ns(entry) == pytest.approx(Incast(message_ns=10.0).end_ns(entry))


def test_messages_that_collide_lose_goodput_and_slots_win_it_back():
    link = Incast(message_ns=10.0, limit=2, collapse=0.5)
    # Eight at once: goodput 1/(1 + 0.5 * 3) = 0.4 until the first ends, and all of them end together.
    assert link.end_ns(np.zeros(8)) == pytest.approx(80 / 0.4)
    assert link.end_ns(np.arange(8) * 10.0) == pytest.approx(80.0)


@each_case(
    "off",
    [
        {"poll": PollStealing(ranks_per_node=4, cores_per_node=2.0, weight=0.0)},
        {"power": PowerShare(ranks_per_node=4, boost=0.0)},
        {"incast": Incast(message_ns=1.0, collapse=0.0)},
    ],
    ids=["poll", "power", "incast"],
)
def test_a_coupling_of_no_strength_leaves_nothing_to_gain(off):
    generator = np.random.default_rng(7)
    for seed in range(20):
        noise = ParametricNoise(kind="exponential", size_ns=20.0)
        job = SimulatedJob(num_ranks=16, num_steps=50, work_ns=100.0, transfer_ns=3.0, noise=noise, seed=seed, **off)
        delays = generator.random((16, 50)) * 40 * (generator.random((16, 50)) < 0.5)
        assert (simulate(job, Delays(delays)).exit_ns >= simulate(job).exit_ns - 1e-6).all()


@pytest.mark.parametrize(
    "on",
    [{"poll": PollStealing(ranks_per_node=2, cores_per_node=1.0)}, {"power": PowerShare(ranks_per_node=2, boost=0.3)}],
    ids=["poll", "power"],
)
def test_with_a_coupling_of_nodes_it_gains_to_hold_back_the_early_rank(on):
    job = SimulatedJob(num_ranks=4, num_steps=10, work_ns=np.array([100.0, 200.0, 100.0, 200.0]), **on)
    delays = np.repeat([[80.0], [0.0], [80.0], [0.0]], 10, axis=1)
    assert simulate(job, Delays(delays)).mean_step_ns < 0.95 * simulate(job).mean_step_ns


def test_slots_gain_where_goodput_collapses():
    job = SimulatedJob(num_ranks=4, num_steps=10, work_ns=100.0, incast=Incast(message_ns=10.0, limit=1, collapse=1.0))
    slots = np.repeat(np.arange(4)[:, np.newaxis] * 10.0, 10, axis=1)
    assert simulate(job).mean_step_ns == pytest.approx(100 + 4 * 10 * 4)
    assert simulate(job, Delays(slots)).mean_step_ns == pytest.approx(100 + 4 * 10)


def test_jobs_of_one_seed_have_the_same_noise_and_others_not():
    noise = ParametricNoise(kind="normal", size_ns=5.0)
    first, again, other = (
        simulate(SimulatedJob(num_ranks=4, num_steps=9, work_ns=50.0, noise=noise, seed=seed)).exit_ns
        for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_a_sleep_ends_late_and_no_delay_does_not():
    job = SimulatedJob(num_ranks=2, num_steps=500, work_ns=100.0, overshoot_ns=5.0)
    found = simulate(job, Delays(np.repeat([[10.0], [0.0]], 500, axis=1)))
    assert not found.delay_ns[1].any()
    assert found.delay_ns[0].min() >= 10.0
    assert found.delay_ns[0].mean() == pytest.approx(15.0, abs=1.0)


@each_case(
    "wrong",
    [
        lambda: SimulatedJob(
            num_ranks=3, num_steps=1, work_ns=1.0, poll=PollStealing(ranks_per_node=2, cores_per_node=1.0)
        ),
        lambda: SimulatedJob(num_ranks=2, num_steps=1, work_ns=np.ones(3)),
        lambda: SimulatedJob(num_ranks=0, num_steps=1, work_ns=1.0),
        lambda: ParametricNoise(kind="gaussian", size_ns=1.0),
        lambda: ParametricNoise(kind="rare", size_ns=1.0, probability=2.0),
        lambda: ResampledNoise(residual_ns=np.zeros((2, 3)), length=4),
        lambda: TracedNoise(begin_ns=np.array([0.0, 1.0]), duration_ns=np.array([2.0, 1.0]), period_ns=9.0),
        lambda: PowerShare(ranks_per_node=1, boost=0.1),
        lambda: Incast(message_ns=1.0, limit=0),
        lambda: SimulatedJob(
            num_ranks=8,
            num_steps=1,
            work_ns=1.0,
            poll=PollStealing(ranks_per_node=2, cores_per_node=1.0),
            power=PowerShare(ranks_per_node=4, boost=0.1),
        ),
    ],
)
def test_refuses_what_cannot_be_simulated(wrong):
    with pytest.raises(UsageError):
        wrong()
