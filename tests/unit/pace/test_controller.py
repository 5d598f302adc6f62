"""The law of pacing against sequences of known truth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lockstep
import numpy as np
import pytest
from cases import each_case

from hpcpace.pace.controller import Controller, Measurement
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm

MAX_AGGRESSIVE = PaceSettings(
    policy="slack",
    share_low=0.95,
    share_high=0.95,
    max_delay_share=0.5,
    guard_us=0,
    guard_overshoots=0,
    engage_share=0.0001,
    engage_steps=1,
)


def _window(own_ms: float, *, least_ms: float = 1.0, arm: PaceArm = PaceArm.OFF, **other: Any) -> Measurement:
    values = {
        "own_ns": (own_ms * 1e6,) * 10,
        "least_ns": (least_ms * 1e6,) * 10,
        "most_ns": (max(own_ms, 90.0) * 1e6,) * 10,
        "work_ns": (99e6 - own_ms * 1e6,) * 10,
        "step_ns": (100e6,) * 10,
    }
    return Measurement(**(values | {"arm": arm} | other))


def _engaged(settings: PaceSettings | None = None) -> Controller:
    controller = Controller(settings or PaceSettings(policy="slack"))
    for _ in range(4):
        controller.update(_window(5.0))
    assert controller.delay_ns > 0
    return controller


def _ranks(num_ranks: int, settings: PaceSettings) -> list[Controller]:
    return [Controller(settings) for _ in range(num_ranks)]


def _with_slow_rank(num_steps: int, slow: np.ndarray) -> np.ndarray:
    work_ns = lockstep.balanced(num_steps, 8, seed=3, noise=0.005)
    work_ns[np.arange(num_steps), slow] += 0.3 * lockstep.STEP_NS
    return work_ns


def test_takes_less_than_the_slack() -> None:
    controller = _engaged()
    assert controller.delay_ns == round(0.5 * 4e6 - 200e3)


@each_case("settings", [PaceSettings(policy="slack"), MAX_AGGRESSIVE])
@each_case("own_ms", [3.0, 20.0, 95.0])
def test_is_never_above_its_bound(settings: PaceSettings, own_ms: float) -> None:
    controller = Controller(settings)
    delays = [controller.update(_window(own_ms, arm=PaceArm.ON if i > 5 else PaceArm.OFF)) for i in range(50)]
    assert 0 < max(delays) <= settings.max_delay_share * 100e6


def test_never_delays_a_fixed_critical_rank() -> None:
    work_ns = _with_slow_rank(600, np.full(600, 5))
    settings = PaceSettings(policy="slack")
    found = lockstep.run(_ranks(8, settings), work_ns)
    others = np.delete(found.delays_ns[300:], 5, axis=1)
    assert found.delays_ns[:, 5].max() == 0
    assert others.min() > 0.04 * lockstep.STEP_NS
    assert found.steps_ns[300:].mean() == pytest.approx((work_ns[300:].max(axis=1) + lockstep.TRANSFER_NS).mean())


def test_rotating_stragglers_are_seen_as_harm_and_end_the_delays() -> None:
    slow = np.random.default_rng(0).integers(0, 8, 2000)
    work_ns = _with_slow_rank(2000, slow)
    ranks = _ranks(8, PaceSettings(policy="slack"))
    found = lockstep.run(ranks, work_ns, is_late_known=False)
    assert all(rank.num_harms > 0 for rank in ranks)
    assert found.delays_ns.max() > 0
    assert (found.delays_ns[-500:] == 0).mean() > 0.8


def test_rotating_stragglers_are_not_delayed() -> None:
    slow = np.random.default_rng(0).integers(0, 8, 2000)
    work_ns = _with_slow_rank(2000, slow)
    ranks = _ranks(8, PaceSettings(policy="slack"))
    found = lockstep.run(ranks, work_ns)
    paced = np.arange(100, 2000)
    assert not found.delays_ns[paced, slow[paced]].any()
    assert (found.delays_ns[paced] > 0.04 * lockstep.STEP_NS).mean() > 0.8  # all the others are
    assert found.steps_ns[paced] == pytest.approx(work_ns[paced].max(axis=1) + lockstep.TRANSFER_NS)
    assert all(rank.num_harms == 0 for rank in ranks)


def test_a_late_rank_is_delayed_by_that_much_less() -> None:
    controller = _engaged()
    usual_ns, base_ns = 94e6, controller.delay_ns
    assert (controller.usual.work_ns, controller.usual.own_share) == (usual_ns, 1.0)
    assert controller.delay_at(0, usual_ns) == controller.delay_at(0, usual_ns - 1e6) == base_ns
    assert controller.delay_at(0, usual_ns + 0.5e6) == base_ns - 500_000
    assert controller.delay_at(0, usual_ns + 50e6) == controller.delay_at(0, math.nan) == 0


def test_a_step_in_which_the_rank_is_late_leaves_the_room_that_it_would_have_had() -> None:
    """Late in half of the steps and then critical: the lower quartile of its slack is 0, that of its room is not."""
    controller = Controller(PaceSettings(policy="slack"))
    late = np.arange(10) % 2 == 1
    for _ in range(8):
        controller.update(_window(5.0))
    own_ns, work_ns = np.where(late, 1e6, 5e6), np.where(late, 98e6, 94e6)
    for _ in range(2):
        controller.update(_window(5.0, own_ns=tuple(own_ns), work_ns=tuple(work_ns)))
    assert controller.delay_ns == round(0.5 * 4e6 - 200e3)


def test_being_late_together_with_all_others_takes_nothing_back() -> None:
    """A rank that is always slow, and steps that are longer for all: slack does not depend on what a step takes."""
    common = np.random.default_rng(4).lognormal(0, 0.2, 800)[:, None]
    work_ns = 0.7 * lockstep.STEP_NS * common * np.ones((800, 4))
    work_ns[:, 2] += 0.3 * lockstep.STEP_NS
    ranks = _ranks(4, PaceSettings(policy="slack"))
    found = lockstep.run(ranks, work_ns)
    assert [round(rank.usual.own_share, 6) for rank in ranks] == [0, 0, 0, 0]
    assert np.delete(found.delays_ns[300:], 2, axis=1).min() > 0.04 * lockstep.STEP_NS
    assert found.steps_ns == pytest.approx(work_ns[:, 2] + lockstep.TRANSFER_NS)


def test_moves_half_of_the_way_in_each_window() -> None:
    controller = _engaged()
    first_ns = controller.delay_ns
    for _ in range(3):
        controller.update(_window(9.0, work_ns=(94e6,) * 10))
    wanted_ns = round(0.5 * 8e6 - 200e3)
    assert controller.delay_ns == round((first_ns + 3 * wanted_ns) / 4)


def test_harm_is_reported_with_its_size() -> None:
    controller = _engaged()
    controller.update(_window(5.0, least_ms=3.0, arm=PaceArm.ON))
    assert controller.is_harmful
    assert controller.harm_ns == 2_000_000


def test_harm_halves_the_delay_and_then_ends_it() -> None:
    controller = _engaged(replace(MAX_AGGRESSIVE, share_low=0.8, share_high=0.8))
    delays = [controller.update(_window(7.0, least_ms=3.0, arm=PaceArm.ON)) for _ in range(4)]
    assert delays[0] > delays[1] > delays[2] == 0


def test_delay_of_the_critical_rank_is_no_harm_where_the_whole_step_gets_shorter() -> None:
    settings = replace(MAX_AGGRESSIVE, share_low=0.8, share_high=0.8)
    times = {"shorter": 80e6, "as before": 99e6}
    delays = {}
    for name, step_ns in times.items():
        controller = _engaged(settings)
        spread = np.linspace(-5e6, 5e6, 10)
        controller.update(_window(7.0, step_ns=tuple(100e6 + spread)))
        paced = _window(7.0, least_ms=3.0, arm=PaceArm.ON, step_ns=tuple(step_ns + spread))
        delays[name] = [controller.update(paced) for _ in range(6)][-1]
    assert delays["shorter"] > 0
    assert delays["as before"] == 0


def test_takes_more_of_the_slack_where_the_whole_step_gets_shorter() -> None:
    settings = replace(MAX_AGGRESSIVE, share_low=0.8, share_high=0.8)
    slacks_ms = np.linspace(2.0, 20.0, 10)
    works_ns = (99e6,) * 10  # without an own share: the slack varies for reasons of others
    delays = {}
    for name, step_ns in {"shorter": 80e6, "as before": 99e6}.items():
        controller = _engaged(settings)
        spread = np.linspace(-5e6, 5e6, 10)
        own_ns = tuple(1e6 + 1e6 * slacks_ms)
        controller.update(_window(7.0, work_ns=works_ns, step_ns=tuple(100e6 + spread)))
        paced = _window(7.0, own_ns=own_ns, work_ns=works_ns, arm=PaceArm.ON, step_ns=tuple(step_ns + spread))
        delays[name] = [controller.update(paced) for _ in range(12)][-1]
    last = np.tile(slacks_ms, 2)[-16:]
    assert delays["as before"] == pytest.approx(0.8e6 * np.quantile(last, 0.25), rel=0.01)
    assert delays["shorter"] == pytest.approx(0.8e6 * np.quantile(last, 0.5), rel=0.01)


def test_is_passive_in_quiet_phases() -> None:
    work_ns = lockstep.balanced(500, 4, seed=1, noise=0.001)
    found = lockstep.run(_ranks(4, PaceSettings(policy="slack")), work_ns)
    assert found.delays_ns.max() == 0


def test_follows_a_slack_that_ends() -> None:
    controller = _engaged()
    for _ in range(2):
        controller.update(_window(1.0))
    assert controller.delay_ns == 0


def test_follows_a_slow_rank_that_moves() -> None:
    slow = np.repeat([2, 6], 800)
    found = lockstep.run(_ranks(8, PaceSettings(policy="slack")), _with_slow_rank(1600, slow))
    assert found.delays_ns[750, 6] > 0
    assert found.delays_ns[750, 2] == found.delays_ns[-50, 6] == 0
    assert found.delays_ns[-50, 2] > 0


@each_case(
    "bad",
    [
        {"own_ns": (math.nan,) * 10},
        {"own_ns": (2e6,) * 9 + (math.nan,)},
        {"own_ns": (-1.0,) * 10},
        {"own_ns": (math.inf,) * 10},
        {"own_ns": (0.5e6,) * 10},
        {"own_ns": ()},
        {"least_ns": (-1.0,) * 10},
        {"least_ns": (math.nan,) * 10},
        {"most_ns": (math.nan,) * 10},
        {"most_ns": (1.0,) * 10},
        {"work_ns": (-1.0,) * 10},
        {"work_ns": (math.inf,) * 10},
        {"work_ns": (1.0,) * 9},
        {"step_ns": (-1.0,) * 10},
        {"step_ns": (math.inf,) * 10},
        {"step_ns": ()},
        {"delayed_ns": (math.nan,)},
        {"overshoot_ns": (-1.0,)},
        {"own_ns": (1e18,) * 10, "most_ns": (1e18,) * 10},
        {"own_ns": ("late",) * 10},
        {"own_ns": None},
    ],
)
def test_fails_open(bad: dict[str, Any]) -> None:
    controller = _engaged()
    assert controller.update(_window(5.0, **bad)) == 0
    assert controller.update(_window(5.0)) == 0  # and begins anew
    for _ in range(3):
        controller.update(_window(5.0))
    assert controller.delay_ns > 0


def test_sleeps_that_last_too_long_count_against_the_delay() -> None:
    controller = _engaged()
    delays = [controller.update(_window(5.0, overshoot_ns=(500e3,) * 10)) for _ in range(12)]
    assert delays[-1] == pytest.approx(2e6 - 200e3 - 1e6, rel=1e-3)
    assert controller.update(_window(5.0, overshoot_ns=(50e6,))) == 0


def test_sleeps_that_last_too_long_do_not_count_where_ranks_poll_on_shared_cores() -> None:
    controller = Controller(PaceSettings(policy="slack").where_polled())
    delays = [controller.update(_window(31.0, overshoot_ns=(500e3,) * 10)) for _ in range(16)]
    assert delays[-1] == pytest.approx(0.5 * 30e6 - 200e3, rel=1e-3)


def test_a_short_delay_is_none_where_ranks_poll_on_shared_cores() -> None:
    settings = PaceSettings(policy="slack")
    delays = {}
    for name, law in {"alone": settings, "polled": settings.where_polled()}.items():
        controller = Controller(law)
        for _ in range(12):
            controller.update(_window(5.0))
        delays[name] = controller.delay_ns
    assert delays == {"alone": round(0.5 * 4e6 - 200e3), "polled": 0}


def test_starts_anew_after_a_reset() -> None:
    controller = _engaged()
    controller.reset()
    assert controller.delay_ns == controller.bound_ns == 0
    assert controller.update(_window(5.0)) == 0


@each_case("noise", [0.02, 0.1, 0.3])
def test_balanced_ranks_cannot_ratchet(noise: float) -> None:
    work_ns = lockstep.balanced(4000, 4, seed=7, noise=noise)
    off = work_ns.max(axis=1).mean() + lockstep.TRANSFER_NS
    found = lockstep.run(_ranks(4, MAX_AGGRESSIVE), work_ns)
    assert found.steps_ns.mean() <= 1.05 * off
    assert found.steps_ns[-400:].mean() <= 1.05 * (work_ns[-400:].max(axis=1).mean() + lockstep.TRANSFER_NS)


def test_learns_in_a_pause_what_the_operation_takes_now() -> None:
    """A transfer that has become slower looks like harm, until pauses show that it is slow without delays, too."""
    controller = _engaged()
    for _ in range(4):
        controller.update(_window(5.0, arm=PaceArm.ON))
    assert controller.delay_ns > 0
    delays = [controller.update(_window(9.0, least_ms=5.0, arm=PaceArm.ON)) for _ in range(200)]
    assert 0 in delays[:20]
    assert all(delay > 0 for delay in delays[-100:])
