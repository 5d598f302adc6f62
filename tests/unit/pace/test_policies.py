"""The published rule in both readings, turns, and what all policies have in common."""

from __future__ import annotations

import math
from typing import Any

import lockstep
import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError
from hpcpace.pace.controller import Measurement, StaggeredJobs, make_policy
from hpcpace.pace.settings import POLICIES, PaceSettings
from hpcpace.trace.schema import PaceArm, PacePolicy

DELAYING = ("published-window", "published-spread", "slack", "stagger")


def _window(own_ns: Any, *, most_ns: float = 20e6, arm: PaceArm = PaceArm.OFF) -> Measurement:
    own = np.broadcast_to(np.asarray(own_ns, dtype=float), 10)
    return Measurement(
        own_ns=tuple(own),
        least_ns=(1e6,) * 10,
        most_ns=(most_ns,) * 10,
        work_ns=tuple(100e6 - own.clip(max=100e6)),
        step_ns=(100e6,) * 10,
        arm=arm,
    )


def _settings(policy: str, **values: Any) -> PaceSettings:
    return PaceSettings(policy=policy, **values)


@each_case("name", DELAYING)
@each_case("seed", range(5))
def test_no_policy_exceeds_its_bound(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    settings = _settings(name, max_delay_share=0.03, published_delay=2.0)
    policy = make_policy(name, settings, index=3, num_members=4)
    for _ in range(100):
        own_ns = 1e6 + random.lognormal(15, 2, 10).clip(max=1e9)
        delay_ns = policy.update(_window(own_ns, most_ns=2e9, arm=random.choice([PaceArm.ON, PaceArm.OFF])))
        assert 0 <= delay_ns <= 0.03 * 100e6
        assert policy.delay_at(random.integers(0, 10**18), random.uniform(0, 2e8)) <= 0.03 * 100e6


@each_case("name", DELAYING)
def test_every_policy_fails_open(name: str) -> None:
    policy = make_policy(name, _settings(name), index=1, num_members=2)
    for _ in range(4):
        policy.update(_window(np.tile([5e6, 15e6], 5)))
    assert policy.update(_window(math.nan)) == policy.delay_at(0, 50e6) == 0
    assert policy.update(_window(-1.0)) == 0


@pytest.mark.parametrize("name", ["observe", "coschedule"])
def test_passive_policies_delay_nobody(name: str) -> None:
    policy = make_policy(name, _settings(name))
    assert policy.update(_window(5e6)) == policy.delay_at(0, 50e6) == policy.harm_ns == 0


def test_published_window_looks_at_the_variation_of_own_waits() -> None:
    steady, varied = (make_policy("published-window", _settings("published-window")) for _ in range(2))
    for _ in range(2):
        steady_ns = steady.update(_window(5e6))
        varied_ns = varied.update(_window(np.tile([2e6, 4e6], 5)))
    assert steady_ns == 0
    assert varied_ns == round(0.8 * 3e6)


def test_published_spread_looks_at_the_spread_of_arrivals() -> None:
    close, spread = (make_policy("published-spread", _settings("published-spread")) for _ in range(2))
    for _ in range(2):
        close_ns = close.update(_window(3e6, most_ns=5e6))
        spread_ns = spread.update(_window(3e6, most_ns=20e6))
    assert close_ns == 0
    assert spread_ns == round(0.8 * 2e6)


@pytest.mark.parametrize("name", ["published-window", "published-spread"])
def test_the_published_rule_costs_time_where_stragglers_rotate(name: str) -> None:
    """Waiting alone cannot make a synchronous job faster; a rule that does not look at its cost makes it slower."""
    work_ns = lockstep.balanced(1000, 8, seed=2, noise=0.1)
    settings = _settings(name)
    found = lockstep.run([make_policy(name, settings) for _ in range(8)], work_ns)
    assert found.delays_ns.max() > 0
    assert found.steps_ns.mean() > (work_ns.max(axis=1) + lockstep.TRANSFER_NS).mean()


def test_ranks_take_turns_within_the_time_of_the_operation() -> None:
    policies = [make_policy("stagger", _settings("stagger"), index=i, num_members=4) for i in range(4)]
    assert [policy.update(_window(5e6)) for policy in policies] == [0, 250_000, 500_000, 750_000]


@each_case(
    ("unix_ms", "delay_ms"),
    [(0, 5), (49, 1), (50, 0), (99, 0), (100, 5), (145, 5), (147, 3), (1_700_000_000_060, 0), (1_700_000_000_048, 2)],
)
def test_jobs_take_turns_by_the_time_of_day(unix_ms: int, delay_ms: int) -> None:
    settings = _settings("stagger", stagger_slots=2, stagger_slot=1, stagger_period_ms=100.0)
    policy = make_policy("stagger", settings)
    assert isinstance(policy, StaggeredJobs)
    policy.update(_window(5e6))
    assert policy.delay_at(unix_ms * 1_000_000, math.nan) == delay_ms * 1_000_000


def test_jobs_find_their_turn_though_each_delay_is_bounded() -> None:
    settings = _settings("stagger", stagger_slots=2, stagger_slot=1, stagger_period_ms=101.0)
    policy = make_policy("stagger", settings)
    policy.update(_window(5e6))
    now_ns, delays_ns = 0, []
    for _ in range(100):
        delays_ns.append(policy.delay_at(now_ns, math.nan))
        now_ns += 100_000_000 + delays_ns[-1]
    assert delays_ns[-10:] == [1_000_000] * 10


@each_case(
    "values",
    [
        {"policy": "fastest"},
        {"policy": "published"},
        {"window_steps": 7},
        {"dropped_steps": 11},
        {"max_pairs": 5},
        {"level": 0.0},
        {"level": math.nan},
        {"max_delay_share": 0.6},
        {"share_low": 0.9},
        {"guard_us": -1.0},
        {"stagger_slots": 2, "stagger_slot": 2, "stagger_period_ms": 10.0},
        {"stagger_slots": 2},
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pace\.[a-z_]+ is .*: it must be"):
        PaceSettings(**values)


def test_every_policy_has_its_value_in_the_trace() -> None:
    assert [name.upper().replace("-", "_") for name in POLICIES] == [policy.name for policy in PacePolicy]
