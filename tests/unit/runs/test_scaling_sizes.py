"""Which runs are the sizes of a scaling series, and how well their speeds are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import CannotTell
from hpcpace.metrics.run_difference import MIN_CV
from hpcpace.runs.load import read_csv
from hpcpace.runs.scaling import result
from hpcpace.runs.scaling.result import Predicted, predict, scaling_of
from hpcpace.runs.scaling.samples import Sample, sample_of_line
from hpcpace.runs.scaling.sizes import ScalingKind, series_of


def _run(name: str, nodes: int, step_s: float, *, batch: float) -> Sample:
    return Sample(
        name=name, path=name, num_nodes=nodes, num_ranks=nodes, step_ns=step_s * 1e9, samples_per_s=None, batch=0.0
    ).with_batch(batch)


def _of_speeds(**speeds: list[float]) -> list[Sample]:
    """Return runs a0, a1... of one node, b0... of two, c0... of four, whose steps take what is given, in seconds."""
    return [
        _run(f"{name}{row}", nodes, step_s, batch=64.0 * nodes)
        for nodes, name in ((1, "a"), (2, "b"), (4, "c"))
        for row, step_s in enumerate(speeds[name])
    ]


def test_a_repeat_in_another_unit_is_left_out_with_the_factor() -> None:
    found = scaling_of(_of_speeds(a=[1.0, 1000.0, 1.01], b=[1.1, 1.12, 0.0011], c=[1.2]))
    assert [size.runs for size in found.sizes] == [("a0", "a2"), ("b0", "b1"), ("c0",)] and found.predictions
    assert found.left_out == (
        "a1 is not pooled with the others of 1 node: its step time is 995 times theirs",
        "b2 is not pooled with the others of 2 nodes: its step time is 0.000991 times theirs",
    )


def test_a_size_whose_repeats_differ_too_much_to_tell_which_is_right_is_left_out() -> None:
    found = scaling_of(_of_speeds(a=[1.0, 1000.0], b=[1.1, 1.12], c=[1.2, 1.22]))
    assert [size.num_units for size in found.sizes] == [2, 4] and len(found.left_out) == 2
    said = "a1 is left out with all of 1 node: the step time of a1 is 1000 times that of a0, and which one is right is "
    assert found.left_out[1] == f"{said}not known"
    with pytest.raises(CannotTell, match=r"no run can be used\n- a0 is left out .* 1000 times"):
        scaling_of(_of_speeds(a=[1.0, 1000.0], b=[1.0, 20.0], c=[5.0, 1.0]))


def test_repeats_of_equal_step_times_and_other_throughputs_are_not_pooled() -> None:
    samples = _of_speeds(a=[1.0], b=[1.0, 1.0, 1.0], c=[1.0])
    samples[2] = replace(samples[2], samples_per_s=64.0)
    assert "its throughput is 0.5 times theirs" in series_of(samples).left_out[0]


def test_repeats_that_differ_by_less_than_a_factor_of_two_are_pooled() -> None:
    assert not series_of(_of_speeds(a=[1.0, 1.99], b=[1.0, 1.4, 1.8], c=[1.0])).left_out


@pytest.mark.parametrize("kind", [ScalingKind.WEAK, ScalingKind.STRONG])
def test_sizes_that_are_known_badly_are_not_predicted(kind: ScalingKind) -> None:
    samples = [replace(one, batch=0.0, samples_per_s=None) for one in _of_speeds(a=[1.0], b=[1.0], c=[1.0])]
    samples[1] = replace(samples[1], error=0.6)
    found = scaling_of(samples, kind=kind)
    assert not found.predictions and found.no_law == "the speed of 2 nodes is known to 60 % only"


def test_a_law_by_which_a_step_takes_no_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanishing(*args: Any, **options: Any) -> Predicted:
        return replace(predict(*args, **options), low_ns=np.array([1e9, 0.0]))

    monkeypatch.setattr(result, "predict", vanishing)
    found = scaling_of(_of_speeds(a=[1.0], b=[1.1], c=[1.2]))
    assert not found.predictions and found.no_law.endswith("larger sizes may take no time")


def test_the_variation_that_repeats_of_one_size_show_is_that_of_sizes_without_repeats() -> None:
    single = scaling_of(_of_speeds(a=[0.97, 1.0, 1.03], b=[1.1], c=[1.2]))
    low, high = single.sizes[1].scaling_interval
    # Student's t with 2 degrees of freedom, of one run against the mean of three.
    assert np.log(high / low) / 2 == pytest.approx(4.303 * 0.03 * (1 + 1 / 3) ** 0.5, rel=0.01)
    assert [size.run_cv for size in single.sizes] == pytest.approx([0.03] * 3, rel=0.01)


def _factor_interval(samples: list[Sample]) -> tuple[float, float]:
    """Return the interval of the logarithm of the scaling factor of the largest size."""
    first, *_, last = series_of(samples).sizes
    middle = float(np.mean(first.log_times) - np.mean(last.log_times))
    half = last.half_width(first)
    return middle - half, middle + half


@each_case("repeats", [(2, 2), (1, 3), (5, 1), (3, 2)])
@each_case("spread", [0.01, 0.03])
def test_the_interval_of_the_scaling_factor_has_the_truth_where_only_some_sizes_have_repeats(
    repeats: tuple[int, int], spread: float
) -> None:
    random = np.random.default_rng(11)
    num_inside, num_series = 0, 300
    for _ in range(num_series):
        one, two = (np.exp(random.normal(0.0, spread, count)).tolist() for count in repeats)
        low, high = _factor_interval(_of_speeds(a=one, b=two, c=[]))
        num_inside += low <= 0.0 <= high
    assert num_inside >= 0.9 * num_series


def test_repeats_that_agree_by_chance_leave_some_doubt() -> None:
    found = scaling_of(_of_speeds(a=[1.0] * 3, b=[1.1] * 3, c=[1.2] * 3))
    low, high = found.sizes[1].scaling_interval
    assert np.log(high / low) / 2 == pytest.approx(2.776 * MIN_CV * (2 / 3) ** 0.5, rel=0.01)


def _of_table(content: str) -> tuple[str, dict[int, list[str]], tuple[str, ...]]:
    """Return what is counted in a table, the runs of each size, and what is left out."""
    lines = [line.split(",") for line in content.split()]
    samples = [
        replace(_run(name, 1, 1.0, batch=64.0), num_nodes=int(nodes or 0), num_ranks=int(ranks or 0))
        for name, nodes, ranks in lines
    ]
    found = series_of(samples)
    return found.unit, {size.num_units: [one.name for one in size.samples] for size in found.sizes}, found.left_out


@each_case(
    ("content", "unit", "sizes"),
    [
        ("a,1, b,,2 c,,4 d,8,", "node", {1: ["a"], 8: ["d"]}),
        ("a,1, b,,2 c,,4 d,,8", "rank", {2: ["b"], 4: ["c"], 8: ["d"]}),
        ("a,1,4 b,,8 c,4,16", "rank", {4: ["a"], 8: ["b"], 16: ["c"]}),
        ("a,1,1 b,1,2 c,4,", "rank", {1: ["a"], 2: ["b"]}),
    ],
)
def test_a_run_that_does_not_say_what_the_sizes_count_is_told(
    content: str, unit: str, sizes: dict[int, list[str]]
) -> None:
    counted, found, left_out = _of_table(content)
    assert (counted, found) == (unit, sizes)
    kept = [name for names in sizes.values() for name in names]
    lost = [line.split(",")[0] for line in content.split() if line.split(",")[0] not in kept]
    assert [sentence.split(" ")[0] for sentence in left_out] == lost
    assert all(f"does not say on how many {unit}s it ran" in sentence for sentence in left_out)


@pytest.mark.parametrize("content", ["a,1,8 b,2,16 c,4,16 d,4,32 e,8,", "a,1,8 c,4,16 b,2,16 d,4,32 e,8,"])
def test_as_many_ranks_on_other_numbers_of_nodes_are_no_repeats_and_do_not_change_what_is_counted(content: str) -> None:
    unit, sizes, left_out = _of_table(content)
    assert (unit, sizes) == ("node", {1: ["a"], 2: ["b"], 4: ["d"], 8: ["e"]})
    assert left_out == ("c is not pooled with the others of 16 ranks: number of nodes is 4, not 2",)


def test_a_throughput_and_a_step_time_are_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,nodes,step_time_s,throughput\na,1,1,64\nb,2,1.1,117\nc,4,1.2,213\n")
    found = scaling_of([sample_of_line(line, str(path)) for line in read_csv(path)])
    assert (
        found.kind is ScalingKind.WEAK and found.why == "the batch of a unit is 64 at every size" and found.predictions
    )
