"""The shipped policies in simulated jobs: without a coupling none of them may gain."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.pace.settings import PaceSettings
from library.paced_jobs import PacedRanks, off_then_on
from library.simulation import KINDS, Incast, ParametricNoise, PollStealing, SimulatedJob, TracedNoise, simulate

DELAYING = ("published-window", "published-spread", "slack", "stagger")
NUM_SET_UPS = 100


def _random_job(seed):
    generator = np.random.default_rng([seed, 99])
    num_ranks = int(generator.integers(2, 9))
    work_ns = 1e8 * (1 + 0.3 * generator.random(num_ranks) * (generator.random() < 0.5))
    is_coscheduled = bool(generator.random() < 0.3)
    size_ns = float(10 ** generator.uniform(5, 8))
    kind = [*KINDS, "trace"][seed % (len(KINDS) + 1)]
    noise = (
        TracedNoise(
            begin_ns=np.arange(1, 21) * 1e8, duration_ns=np.full(20, size_ns / 2), period_ns=2.2e9,
            is_coscheduled=is_coscheduled,
        )
        if kind == "trace"
        else ParametricNoise(
            kind=kind, size_ns=size_ns, probability=0.1, period=int(generator.integers(3, 30)),
            is_coscheduled=is_coscheduled,
        )
    )  # fmt: skip
    return SimulatedJob(
        num_ranks=num_ranks,
        num_steps=80,
        work_ns=work_ns,
        transfer_ns=float(generator.random() * 2e7),
        noise=noise,
        overshoot_ns=float(generator.choice([0.0, 1e5])),
        incast=Incast(message_ns=1e6) if generator.random() < 0.2 else None,
        seed=seed,
    )


@pytest.fixture(scope="module")
def outcomes():
    """Step time with a policy less that without, and the longest delay, of each set-up."""
    found = {policy: ([], []) for policy in DELAYING}
    for seed in range(NUM_SET_UPS):
        job = _random_job(seed)
        without = simulate(job)
        for policy in DELAYING:
            settings = PaceSettings(policy=policy, max_delay_share=0.3, published_delay=0.9)
            paced = simulate(job, PacedRanks(settings, arm=off_then_on(20)))
            gains, delays = found[policy]
            gains.append(without.mean_step_ns - paced.mean_step_ns)
            delays.append(paced.delay_ns.max())
    return found


@each_case("policy", DELAYING)
def test_no_policy_gains_where_ranks_only_wait_for_each_other(outcomes, policy):
    assert len(outcomes[policy][0]) == NUM_SET_UPS
    # In nanoseconds, of steps of 100 ms: rounding.
    assert max(outcomes[policy][0]) <= 1e-3


@each_case("policy", DELAYING)
def test_each_policy_was_on_in_many_of_these_jobs(outcomes, policy):
    assert sum(delay > 0 for delay in outcomes[policy][1]) >= NUM_SET_UPS / 5


def test_slack_gains_where_polling_takes_processor_time_and_not_where_it_does_not():
    def gain(cores):
        job = SimulatedJob(
            num_ranks=4,
            num_steps=400,
            work_ns=np.array([3e7, 1e8, 3e7, 1e8]),
            noise=ParametricNoise(kind="normal", size_ns=1e6),
            poll=PollStealing(ranks_per_node=2, cores_per_node=cores),
        )
        paced = simulate(job, PacedRanks(PaceSettings(policy="slack", max_delay_share=0.5), arm=off_then_on(20)))
        return 1 - paced.mean_step_ns / simulate(job).mean_step_ns

    assert gain(1.0) > 0.1
    assert gain(2.0) == pytest.approx(0.0, abs=1e-3)
