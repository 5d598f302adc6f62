from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.stragglers import SearchObstacle, find_stragglers

BASE_NS = 10_000_000


def noise(kind, num_ranks, num_steps, random):
    shape = (num_ranks, num_steps)
    if kind == "normal":
        return random.normal(0, 1, shape)
    if kind == "log-normal":
        return np.exp(random.normal(0, 0.5, shape)) / 0.6
    if kind == "heavy-tailed":
        return random.standard_t(3, shape)
    if kind == "periodic":
        return random.normal(0, 1, shape) + 0.4 * np.sin(
            np.arange(num_steps) / 3 + random.uniform(0, 7, (num_ranks, 1))
        )
    if kind == "shared by nodes":
        return random.normal(0, 0.5, shape) + np.repeat(random.normal(0, 1, (num_ranks // 2, num_steps)), 2, axis=0)
    assert kind == "autocorrelated"
    values = random.normal(0, 1, shape)
    for step in range(1, num_steps):
        values[:, step] = 0.5 * values[:, step - 1] + np.sqrt(0.75) * values[:, step]
    return values


def healthy(num_ranks=8, num_steps=200, *, seed=0, kind="normal", size=0.05):
    return BASE_NS * (1 + size * noise(kind, num_ranks, num_steps, np.random.default_rng(seed)))


def search(work_ns, *, per_node=1, role=None, **options):
    ranks = np.arange(len(work_ns))
    role = np.zeros_like(ranks) if role is None else np.asarray(role)
    return find_stragglers(work_ns, role, ranks // per_node, **{"floor_share": 0.03, "level": 0.005, **options})


def only(work_ns, **options):
    (found,) = search(work_ns, **options).found
    return found


@each_case("kind", ["normal", "log-normal", "heavy-tailed", "periodic", "shared by nodes", "autocorrelated"])
def test_healthy_noise_has_no_straggler(kind):
    alarms, num_searches = 0, 0
    for seed in range(8):
        for num_ranks, num_steps, size in ((4, 60, 0.05), (8, 200, 0.05), (8, 200, 0.2), (32, 200, 0.1)):
            work_ns = healthy(num_ranks, num_steps, seed=seed, kind=kind, size=size)
            alarms += len(search(work_ns, per_node=2).found)
            num_searches += 1
    assert alarms <= 0.01 * num_searches + 1


@each_case("num_ranks", [2, 8, 64])
@each_case("kind", ["normal", "heavy-tailed"])
def test_a_rank_ten_percent_slower_is_found(num_ranks, kind):
    for seed in range(8):
        work_ns = healthy(num_ranks, seed=seed, kind=kind)
        work_ns[1] *= 1.1
        found = only(work_ns)
        assert (found.kind, found.ids, found.pattern) == ("rank", (1,), "fixed")
        assert found.effect.value == pytest.approx(0.1, abs=0.03)
        assert found.p_value <= 0.005


@pytest.mark.parametrize("num_ranks", [8, 128])
def test_a_rank_five_percent_slower_is_found_in_nearly_all_runs(num_ranks):
    num_found = 0
    for seed in range(33):
        work_ns = healthy(num_ranks, seed=seed)
        work_ns[3] *= 1.05
        num_found += [found.ids for found in search(work_ns).found] == [(3,)]
    assert num_found >= 32


def test_the_interval_covers_the_effect():
    covered = 0
    for seed in range(40):
        work_ns = healthy(seed=seed)
        work_ns[3] *= 1.1
        low, high = only(work_ns).effect.interval
        covered += low <= 0.1 <= high
    assert covered >= 35


def test_one_rank_a_node_cannot_be_told_from_its_node():
    work_ns = healthy()
    work_ns[5] *= 1.2
    assert only(work_ns).aliases == (("node", 5),)
    assert only(work_ns, per_node=2).aliases == ()


def test_a_node_is_named_where_all_its_ranks_are_slow():
    work_ns = healthy()
    work_ns[4:6] *= 1.1
    found = only(work_ns, per_node=2)
    assert (found.kind, found.ids, found.ranks, found.pattern) == ("node", (2,), (4, 5), "fixed")


def test_a_slot_is_named_where_the_same_place_of_every_node_is_slow():
    work_ns = healthy(12)
    work_ns[1::4] *= 1.1
    found = only(work_ns, per_node=4)
    assert (found.kind, found.ids, found.ranks) == ("slot", (1,), (1, 5, 9))


def test_half_of_all_ranks_may_be_slow():
    work_ns = healthy()
    work_ns[4:] *= 1.2
    found = only(work_ns, per_node=4)
    assert (found.kind, found.ids) == ("node", (1,))


def test_a_slow_interval_is_transient_and_dated():
    work_ns = healthy()
    work_ns[1, 60:110] *= 1.2
    found = only(work_ns)
    assert (found.pattern, found.ids) == ("transient", (1,))
    assert abs(found.step_range[0] - 60) <= 5
    assert abs(found.step_range[1] - 110) <= 5
    assert found.effect.value == pytest.approx(0.2, abs=0.05)


@each_case("period", [2, 4, 20])
def test_a_periodic_delay_has_its_period(period):
    work_ns = healthy()
    work_ns[2, 1::period] *= 1.5
    found = only(work_ns)
    assert (found.pattern, found.ids, found.period_steps) == ("periodic", (2,), period)
    assert found.effect.value == pytest.approx(0.5, abs=0.06)
    assert found.late_share == pytest.approx(1 / period, abs=0.02)


def test_a_period_of_few_long_delays_is_seen_beside_shorter_ones():
    work_ns = healthy(2, num_steps=58)
    work_ns[1, 6::8] *= 60
    work_ns[1, [0, 3]] *= 2
    found = only(work_ns)
    assert (found.pattern, found.ids, found.period_steps) == ("periodic", (1,), 8)


def test_a_period_may_miss_by_one_step():
    work_ns = healthy(num_steps=600)
    at = np.arange(10, 600, 30) + np.random.default_rng(0).integers(0, 2, 20)
    work_ns[2, at] *= 1.5
    found = only(work_ns)
    assert found.pattern == "periodic"
    assert abs(found.period_steps - 30) <= 1


@each_case("num_ranks", [4, 8, 32])
def test_ranks_that_take_turns_are_one_rotation(num_ranks):
    work_ns = healthy(num_ranks)
    step = np.arange(200)
    work_ns[step % num_ranks, step] *= 1.5
    found = only(work_ns, per_node=2)
    assert (found.kind, found.pattern, found.ids) == ("rank", "rotating", tuple(range(num_ranks)))
    assert found.late_share > 0.95


def test_ranks_that_take_turns_in_no_order_are_a_rotation():
    work_ns = healthy()
    step = np.arange(200)
    work_ns[np.random.default_rng(7).integers(0, 8, 200), step] *= 1.5
    found = only(work_ns)
    assert (found.pattern, found.period_steps) == ("rotating", None)


def test_nodes_that_take_turns_are_a_rotation_of_nodes():
    work_ns = healthy()
    for step in range(200):
        first = 2 * (step % 4)
        work_ns[first : first + 2, step] *= 1.5
    found = only(work_ns, per_node=2)
    assert (found.kind, found.pattern, found.ids, found.period_steps) == ("node", "rotating", (0, 1, 2, 3), 4)


def test_independent_late_steps_are_no_rotation():
    for seed in range(10):
        work_ns = healthy(seed=seed)
        work_ns[np.random.default_rng(seed + 100).random(work_ns.shape) < 0.1] *= 1.5
        assert not [found for found in search(work_ns).found if found.pattern == "rotating"]


def test_two_stragglers_are_both_named_worst_first():
    work_ns = healthy()
    work_ns[1] *= 1.1
    work_ns[6] *= 1.3
    assert [found.ids for found in search(work_ns).found] == [(6,), (1,)]


def test_ranks_are_compared_within_their_role_only():
    work_ns = healthy()
    work_ns[4:] *= 3
    role = [0] * 4 + [1] * 4
    assert search(work_ns, role=role).found == ()
    work_ns[5] *= 1.2
    assert only(work_ns, role=role).ids == (5,)


def test_effects_below_the_floor_are_not_named():
    work_ns = healthy(size=0.005)
    work_ns[2] *= 1.02
    assert search(work_ns).found == ()
    assert only(work_ns, floor_share=0.01).ids == (2,)


def test_a_search_says_what_it_could_have_seen():
    assert search(healthy()).smallest_share == pytest.approx(0.04, abs=0.015)


@each_case(
    ("work_ns", "obstacle"),
    [
        (healthy(1), SearchObstacle.NOBODY_COMPARED),
        (np.zeros((4, 100)), SearchObstacle.NOBODY_COMPARED),
        (healthy(4, 8), SearchObstacle.TOO_FEW_STEPS),
        (np.zeros((4, 0)), SearchObstacle.NOBODY_COMPARED),
        (np.zeros((0, 0)), SearchObstacle.NOBODY_COMPARED),
        (healthy(4, 40, size=0.8), SearchObstacle.TOO_MUCH_NOISE),
    ],
)
def test_what_cannot_be_told_is_said(work_ns, obstacle):
    result = search(work_ns)
    assert result.found == ()
    assert result.obstacle is obstacle


def test_constant_work_has_no_straggler_and_a_constant_excess_is_one():
    work_ns = np.full((4, 50), float(BASE_NS))
    assert search(work_ns).found == ()
    work_ns[1] *= 1.5
    assert only(work_ns).ids == (1,)


def test_the_answer_does_not_change_from_run_to_run():
    work_ns = healthy()
    work_ns[3] *= 1.05
    assert search(work_ns) == search(work_ns)
