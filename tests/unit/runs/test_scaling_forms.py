"""Forms of growth that a scaling law has to allow: of known steps, the next sizes have to be in its intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from probe_sample import made_probe
from sample_runs import MS, sample_run

from hpcpace.report.sections.history import scaling_headline
from hpcpace.runs.scaling.result import Knee, Scaling, predict, scaling_of
from hpcpace.runs.scaling.samples import PARTS, Sample, jitter_growth, least_work
from hpcpace.runs.scaling.sizes import series_of

Parts = Callable[[int], Mapping[str, float]]


def _sample(nodes: int, parts_ms: Mapping[str, float], *, strong: bool = False, ranks: int = 1) -> Sample:
    parts = {**dict.fromkeys(PARTS, 0.0), **parts_ms}
    step_ns, batch = sum(parts.values()) * MS, 64.0 if strong else 64.0 * nodes
    return Sample(
        name=f"n{nodes}",
        path=f"n{nodes}",
        num_nodes=nodes,
        num_ranks=nodes * ranks,
        step_ns=step_ns,
        samples_per_s=batch / step_ns * 1e9,
        batch=batch,
        parts_ns={part: value * MS for part, value in parts.items()},
        growth=tuple((k, 1.0) for k in range(1, nodes + 1)),
    )


def _alone(nodes: int, step_ms: float, *, strong: bool = False) -> Sample:
    return replace(_sample(nodes, {"work": step_ms}, strong=strong), parts_ns=None)


def _assert_inside(found: Scaling, truth_ms: Callable[[int], float]) -> None:
    assert len(found.predictions) == 2
    for size in found.predictions:
        low, high = size.step_interval_ns
        assert low <= truth_ms(size.num_units) * MS <= high


@each_case("sizes", [(1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16)])
@each_case(
    ("ranks", "parts"),
    [
        (1, lambda n: {"work": 100, "transfer": 2 * (n - 1) / n, "other": 4 * (n - 1)}),
        (1, lambda n: {"work": 100, "transfer": 15 * (n**0.5 - 1)}),
        (1, lambda n: {"work": 100, "transfer": 5 * (n > 1)}),
        (8, lambda n: {"work": 100, "transfer": 10 + 20 * (n - 1) / n}),
        (8, lambda n: {"work": 100, "transfer": 20 * (n - 1) / n}),
        (8, lambda n: {"work": 100, "transfer": 30 * (8 * n - 1) / (8 * n)}),
        (8, lambda n: {"work": 100, "transfer": 0.5 * (8 * n - 1)}),
    ],
    ids=["checkpoint", "mesh", "second", "on-node-and-ring", "ring-of-nodes", "ring-of-ranks", "hops-of-ranks"],
)
def test_the_next_sizes_are_inside_whatever_grows(sizes: tuple[int, ...], ranks: int, parts: Parts) -> None:
    found = scaling_of([_sample(nodes, parts(nodes), ranks=ranks) for nodes in sizes])
    _assert_inside(found, lambda nodes: sum(parts(nodes).values()))
    assert min(size.step_ns for size in found.predictions) >= sum(parts(sizes[-1]).values()) * MS
    low, high = found.predictions[1].step_interval_ns
    assert high < 1.6 * low


@each_case("growing", [lambda n: n - 1, lambda n: 3 * (n**0.5 - 1), lambda n: 2 * np.log2(n)])
def test_three_sizes_of_shared_work_leave_open_what_grows(growing: Callable[[int], float]) -> None:
    def step_ms(nodes: int) -> float:
        return float(3 + 97 / nodes + growing(nodes))

    _assert_inside(scaling_of([_alone(nodes, step_ms(nodes), strong=True) for nodes in (1, 2, 4)]), step_ms)


def test_a_law_goes_on_from_the_largest_size_where_no_form_has_it() -> None:
    """Steps that shrink faster than the work of a node: the form misses the last one by a tenth."""
    series = series_of([_alone(nodes, 100 / nodes**1.2, strong=True) for nodes in (1, 2, 4, 8, 16)])
    found = predict(series, [16])
    assert abs(found.misfit) > 0.1
    assert found.step_ns[0] == pytest.approx(100 / 16**1.2 * MS, rel=0.02)


def test_repeats_that_agree_by_chance_are_known_as_well_as_those_of_other_sizes() -> None:
    """Three runs of the largest size, 1.5 % longer, differ by 0.01 %, and those of the others by 2 %."""
    repeats = [
        replace(_alone(nodes, step_ms * (1 + error * spread)), path=f"{nodes}{error}")
        for nodes, step_ms, spread in ((1, 100.0, 0.02), (2, 100.0, 0.02), (4, 100.0, 0.02), (8, 101.5, 1e-4))
        for error in (-1, 0, 1)
    ]
    assert predict(series_of(repeats), [8]).step_ns[0] < 101 * MS


def test_lasting_differences_do_not_grow_as_jitter_does() -> None:
    """One host in each size is 20 % slower: with more hosts, the others wait no longer for it."""

    def sample(nodes: int) -> Sample:
        slow = 20.0 * (nodes > 1)
        parts = {"work": 100 + slow / nodes, "imbalance": slow * (1 - 1 / nodes), "jitter": 0.5 * (nodes > 1)}
        return replace(_sample(nodes, parts), least_work=100 / parts["work"])

    found = scaling_of([sample(nodes) for nodes in (1, 2, 4)])
    _assert_inside(found, lambda nodes: 120.5)
    for size in found.predictions:
        assert size.step_ns == pytest.approx(120.5 * MS, rel=0.03)
        assert size.parts_ns["jitter"] == pytest.approx(0.5 * MS, rel=0.2)


def test_imbalance_of_units_that_all_differ_grows_with_them() -> None:
    """Means of hosts with a normal spread of 5 %: the slowest of more of them is slower."""
    slowest = {2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070}
    found = scaling_of(
        [_sample(nodes, {"work": 100, "imbalance": 5 * slowest.get(nodes, 0.0)}) for nodes in (1, 2, 4, 8)]
    )
    _assert_inside(found, lambda nodes: 100 + 5 * slowest[nodes])
    assert found.predictions[1].parts_ns["imbalance"] > 1.2 * 5 * slowest[8] * MS


def test_a_slow_rank_is_taken_out_of_the_growth_of_jitter() -> None:
    """A(k) of one rank in four that takes 20 % longer in all steps, beside 1 % of jitter for two and more."""
    lasting = [1 + (0.2 * k / 4 - 0.05) / 1.05 for k in range(1, 5)]
    curve = tuple((k, value + 0.01 * (k > 1)) for k, value in enumerate(lasting, start=1))
    found = jitter_growth(sample_run(work=(100.0, 100.0, 100.0, 120.0), amplification=curve, error=0.0))
    assert [value for _, value in found] == pytest.approx([1.0, 1.01, 1.01, 1.01])


def test_a_spread_of_means_that_is_noise_leaves_the_growth_as_it_is() -> None:
    curve = ((1, 1.0), (2, 1.05), (3, 1.08), (4, 1.1))
    found = jitter_growth(sample_run(work=(99.0, 100.0, 100.0, 101.0), amplification=curve, error=0.02))
    assert [value for _, value in found] == pytest.approx([value for _, value in curve])


def test_work_of_slower_ranks_is_no_work_of_all() -> None:
    """Every other host is slower, so that the mean work grows, and no rank has more of it than one alone had."""
    alone, several = (
        replace(_sample(nodes, parts), least_work=share)
        for nodes, parts, share in (
            (1, {"work": 100.0}, least_work(sample_run(work=(100.0,), hosts=("n0",)))),
            (4, {"work": 110.0, "imbalance": 10.0}, least_work(sample_run(work=(100.0, 120.0) * 2, error=0.0))),
        )
    )
    found = scaling_of([alone, several])
    assert found.stop is not None and found.stop.part == "imbalance"
    assert found.stop.lost["imbalance"] == pytest.approx(20 / 120) and found.stop.lost["work"] == pytest.approx(0.0)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_jitter_in_proportion_to_the_work_and_without_it_are_both_inside(power: float) -> None:
    """Normal jitter of 10 % of the work on one node, and of a tenth of a share of it or as long there."""
    slowest = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766}

    def of(nodes: int) -> dict[str, float]:
        work = 100 / nodes
        return {"work": work, "jitter": 10 * (work / 100) ** power * slowest[nodes]}

    def sample(nodes: int) -> Sample:
        scale = 0.1 * (1 / nodes) ** (power - 1)
        curve = tuple((k, 1 + scale * (slowest.get(k) or 0.846 * (k == 3))) for k in range(1, nodes + 1))
        return replace(_sample(nodes, of(nodes), strong=True), growth=curve)

    _assert_inside(scaling_of([sample(nodes) for nodes in (1, 2, 4)]), lambda nodes: sum(of(nodes).values()))


def test_the_interval_of_a_knee_has_the_error_of_the_law() -> None:
    """Growth that ends and begins again is of no form: the knee is as uncertain as steps beyond the measured ones."""
    steps = {1: 100.0, 2: 118.0, 4: 121.0, 8: 147.0, 16: 166.0}
    repeats = [
        replace(_alone(nodes, step_ms * (1 + error)), path=f"{nodes}-{error}")
        for nodes, step_ms in steps.items()
        for error in (-1e-4, 0.0, 1e-4)
    ]
    knee = scaling_of(repeats).knee
    assert knee is not None and not knee.is_measured
    ends = [32 if end is None else end for end in (knee.low, knee.high)]
    assert ends[1] >= 1.5 * ends[0]


@each_case(
    ("knee", "said"),
    [
        (
            (None, None, None),
            "none found: every doubling up to 64 nodes, as measured or predicted, gives at least half",
        ),
        ((None, None, None), "of its ideal gain (95 %)"),
        ((None, 25, None), "gives at least half of its ideal gain, but it may be from 25 nodes on (95 %)"),
        ((25, 20, None), "is expected to stop paying at 25 nodes (95 %: 20 to more than 32): each node"),
        ((25, 28, 28), "is expected to stop paying at 25 nodes (95 %: 28): each node"),
        ((25, 25, 25), "is expected to stop paying at 25 nodes: each node"),
    ],
)
def test_a_knee_is_said_with_its_doubt(knee: tuple[int | None, int | None, int | None], said: str) -> None:
    found = scaling_of([_alone(nodes, 100.0) for nodes in (1, 2, 4)])
    of = Knee(num_units=knee[0], low=knee[1], high=knee[2], searched=32, is_measured=False)
    assert said in dict(scaling_headline(replace(found, knee=of)))["Knee"]


@each_case(
    ("op", "nodes", "said"),
    [
        ("all_reduce", 8, "not by the probe: its laws of all_reduce are of 2 and 4 nodes, and none of 8"),
        ("all_to_all", 4, "not by the probe: it has no law of all_to_all between nodes"),
        ("", 4, "not by the probe: the operations of a step are not known"),
    ],
)
def test_a_probe_that_does_not_fit_is_said_to_be_unused(op: str, nodes: int, said: str) -> None:
    samples = [
        replace(_sample(count, {"work": 100, "transfer": count - 1}), calls=((op, 4096.0, 1.0),) if op else ())
        for count in (1, 2, 4, 8)
        if count <= nodes
    ]
    assert any(said in clause for clause in scaling_of(samples, probe=made_probe()).rests_on)


def test_a_probe_beside_speeds_alone_is_said_to_be_unused() -> None:
    rests_on = scaling_of([_alone(nodes, 100.0) for nodes in (1, 2, 4)], probe=made_probe()).rests_on
    assert rests_on[-1] == "the probe is not used: how long transfers take is not known"
