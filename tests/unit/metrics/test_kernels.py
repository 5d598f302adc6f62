"""What is compiled gives what numpy gives, to the last bit, on rows of any kind."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import numpy as np
from cases import each_case
from known_runs import MS, data_parallel, known_run, pipeline

from hpcpace.metrics import kernels
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.communication import under_way_ns
from hpcpace.metrics.critical_path import critical_path
from hpcpace.metrics.kernels import grouped_medians, others_median, stable_order
from hpcpace.metrics.matching import match
from hpcpace.metrics.phases import CoveredTime, parts_of_steps
from hpcpace.metrics.propagation import delay_origins, last_partner
from hpcpace.metrics.segments import Blocking, local_work
from hpcpace.metrics.step_graph import step_graph
from hpcpace.metrics.waits import Blocks, waits
from hpcpace.metrics.what_if import Replaced, replay, replayed_ns
from hpcpace.trace.schema import ExitKind, Op, Phase


def both(monkeypatch, function):
    """Return what a function returns with the kernels, and without them."""
    assert kernels.library() is not None, "the kernels are not built: python setup.py build_ext --inplace"
    found = function()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_SOURCE", Path("nowhere", "kernels.cpp"))
        kernels.library.cache_clear()
        assert kernels.library() is None
        expected = function()
    kernels.library.cache_clear()
    return found, expected


def assert_same(found, expected):
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.shape == expected.shape
        assert (found == expected).all()
    else:
        assert found == expected


def any_run(seed):
    """Return rows that may be anything: messages and roots, times in no order, other steps, gaps, doubles."""
    random = np.random.default_rng(seed)
    num_ranks, num_operations, num_steps = int(random.integers(2, 7)), int(random.integers(1, 90)), 6
    groups = {0: tuple(range(num_ranks)), 1: tuple(range(0, num_ranks, 2)), 2: (0, 1)}
    ops = [*range(len(Op)), *[int(Op.ALL_REDUCE)] * 6]
    rows, numbers = [[] for _ in range(num_ranks)], dict.fromkeys(groups, 0)
    length_ns = num_steps * 10 * MS // num_operations
    for at in range(num_operations):
        group, op = int(random.integers(3)), int(random.choice(ops))
        members = groups[group]
        peers = dict.fromkeys(members, int(random.choice(members)))
        if op in (Op.SEND, Op.RECV):
            members = (0, 1)
            peers = {0: 1, 1: 0}
        for rank in members:
            if random.random() < (0.1 if seed % 3 == 0 else 0.0):
                continue  # lost
            enter = at * length_ns + int(random.integers(0, (1 + 3 * (seed % 2)) * length_ns))
            took, step = int(random.integers(0, 3 * length_ns)), at * num_steps // num_operations
            own_op = (Op.SEND, Op.RECV)[rank] if op in (Op.SEND, Op.RECV) else op
            step += int(seed % 5 == 0 and random.random() < 0.2)
            kind = int(random.choice([ExitKind.COMPLETION, ExitKind.WAIT]))
            times = (enter, enter + took, int(random.integers(0, took + 1)))
            row = (step, group, numbers[group], own_op, 8, peers[rank], *times, kind)
            rows[rank] += [row] * (2 if seed % 7 == 0 and random.random() < 0.05 else 1)
        numbers[group] += 1
    begin = np.tile(np.arange(num_steps) * 10 * MS, (num_ranks, 1)) + random.integers(0, MS, (num_ranks, num_steps))
    run = known_run(rows, begin, begin + 9 * MS, groups=groups)
    return run if seed % 4 else replace(run, matching=match(run.operations, unknown_clocks=run.ranks[-1:]))


SEEDS = range(60)


@each_case("seed", SEEDS)
def test_waits_partners_and_origins(monkeypatch, seed):
    run = any_run(seed)
    done, matching = run.operations, run.matching
    random = np.random.default_rng(seed)
    mask = None if seed % 2 else random.random(len(done)) < 0.5
    wait_ns = random.integers(0, 20 * MS, len(done))

    def measured():
        found = waits(done, matching)
        origins = [
            delay_origins(done, matching, of_rows, ranks=run.ranks[: 1 + seed % 7], mask=mask)
            for of_rows in (found.wait_ns, wait_ns)
        ]
        return astuple(found), last_partner(done, matching), [astuple(found) for found in origins]

    assert_same(*both(monkeypatch, measured))


@each_case("seed", SEEDS)
def test_critical_paths(monkeypatch, seed):
    run, random = any_run(seed), np.random.default_rng(seed)
    done = run.operations
    work = Blocking(is_known=done.step < 6, is_blocking=random.random(len(done)) < 0.4)
    begin = np.sort(random.integers(0, 60 * MS, 8))
    blocks = Blocks(rank=random.integers(0, len(run.ranks), 8), begin_ns=begin, end_ns=begin + MS)

    def measured():
        path = critical_path(done, run.matching, work, run.steps, ranks=run.ranks, blocks=blocks)
        return astuple(path)

    assert_same(*both(monkeypatch, measured))


@each_case("seed", SEEDS)
def test_parts_of_steps(monkeypatch, seed):
    random = np.random.default_rng(seed)
    begin = np.cumsum(random.integers(5 * MS, 10 * MS, 8))
    steps = (begin, begin + random.integers(MS, 5 * MS, 8))
    phase_begin = np.sort(random.integers(0, 80 * MS, 30)) // (MS if seed % 2 else 1) * (MS if seed % 2 else 1)
    phases = (random.integers(0, len(Phase) + 2, 30).astype(np.uint8), phase_begin)
    phases = (*phases, phase_begin + random.integers(0, 9 * MS, 30))
    enter = np.cumsum(random.integers(0, 3 * MS, 40))
    exit_ = enter + random.integers(0, 4 * MS if seed % 3 else MS // 2, 40)
    blocked, wait = random.integers(0, exit_ - enter + 1), random.integers(0, exit_ - enter + 1)
    if seed % 3 == 0:  # calls that follow each other
        exit_ = np.minimum(exit_, np.append(enter[1:], exit_[-1]))

    def measured():
        return parts_of_steps(steps, phases, (enter, exit_, blocked, wait)), under_way_ns(
            enter[::-1], exit_[::-1], *steps
        )

    assert_same(*both(monkeypatch, measured))


@each_case("seed", range(20))
def test_times_on_the_reference_clock_and_time_covered_until_them(monkeypatch, seed):
    random = np.random.default_rng(seed)
    local = np.cumsum(random.integers(1, 20 * MS, int(random.integers(2, 30))))
    offset = random.integers(-MS, MS, len(local)) * (10**9 if seed % 5 == 0 else 1)
    clock = CommonClock(local_ns=local, offset_ns=offset, halfwidth_ns=np.ones(len(local), np.int64))
    times = random.integers(-MS, int(local[-1]) + MS, 200)
    times = times if seed % 3 == 0 else np.sort(times)[random.integers(0, 20) :]
    begin = random.integers(0, int(local[-1]), int(random.integers(0, 20)))
    covered = CoveredTime.of(begin, begin + random.integers(0, 9 * MS, len(begin)))

    def measured():
        edges = np.concatenate([covered.begin_ns, covered.end_ns, times, local])
        return reference_times(clock, np.append(times, local)), covered.until_ns(edges)

    assert_same(*both(monkeypatch, measured))


@each_case("seed", range(20))
def test_medians_and_orders(monkeypatch, seed):
    random = np.random.default_rng(seed)
    values = random.integers(0, 20, (int(random.integers(2, 12)), int(random.integers(1, 40)))).astype(np.float64)
    number = random.integers(0, 9 if seed % 2 else 100_000, values.size)

    def measured():
        num_groups = int(number.max()) + 3
        return others_median(values), stable_order(number), grouped_medians(number, values.ravel(), num_groups)

    assert_same(*both(monkeypatch, measured))


@each_case("num_steps", [1, 15, 16, 45])
@each_case("build", [data_parallel, pipeline], ids=["data_parallel", "pipeline"])
def test_graphs_and_replays(monkeypatch, build, num_steps):
    random = np.random.default_rng(num_steps)
    shape = (4, num_steps, 3) if build is data_parallel else (4, num_steps)
    run = build((random.exponential(10, shape) * MS).astype(np.int64))
    role = np.zeros(4, np.int64) if build is data_parallel else np.arange(4)

    def measured():
        work = local_work(run.operations, run.steps, ranks=run.ranks, role=role)
        arguments = (run.operations, run.matching, run.waits, work, run.steps)
        graph = step_graph(*arguments, ranks=run.ranks, role=role)
        nodes = np.arange(0, len(graph.kind), 3)
        replaced = Replaced(nodes=nodes, weight_ns=graph.weight_ns[nodes] / 3)
        return graph.weight_ns, replay(graph), replayed_ns(graph), replayed_ns(graph, replaced)

    assert_same(*both(monkeypatch, measured))


def test_values_that_have_no_order_are_left_to_numpy(monkeypatch):
    values = np.array([[1.0, np.nan, 3.0], [2.0, 2.0, 2.0], [0.0, 5.0, 1.0]])
    found, expected = both(monkeypatch, partial(others_median, values))
    assert np.array_equal(found, expected, equal_nan=True)
    assert_same(*both(monkeypatch, partial(others_median, values[:, ::2].T)))


def test_a_library_of_another_source_is_not_used(monkeypatch, tmp_path):
    source = tmp_path / "kernels.cpp"
    source.write_text("// changed")
    (built,) = kernels._SOURCE.parent.glob("_kernels*.so")
    (tmp_path / built.name).symlink_to(built)
    monkeypatch.setattr(kernels, "_SOURCE", source)
    kernels.library.cache_clear()
    assert kernels.library() is None
    monkeypatch.undo()
    kernels.library.cache_clear()
    assert kernels.library() is not None


def test_a_sender_waits_only_for_what_was_seen():
    rows = [[(0, 0, 0, Op.SEND, 8, 1, 1 * MS, 4 * MS, 3 * MS, kind)] for kind in (ExitKind.COMPLETION, ExitKind.WAIT)]
    rows[1] = [(0, 0, 0, Op.RECV, 8, 0, 3 * MS, 4 * MS, MS, ExitKind.COMPLETION)]
    run = known_run(rows, np.zeros((2, 1)), np.full((2, 1), 5 * MS))
    assert run.waits.wait_ns.tolist() == [2 * MS, 0]
