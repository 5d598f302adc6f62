"""How a job scales, from samples whose law is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case
from probe_sample import made_probe
from sample_runs import sample_run

from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.metrics.run_difference import PRIOR_CV
from hpcpace.probe.record import LawPiece
from hpcpace.runs.load import read_csv
from hpcpace.runs.scaling.result import COLUMNS, Band, band, predict, rows_of, scaling_of
from hpcpace.runs.scaling.samples import PARTS, Sample, sample_of_line, sample_of_run
from hpcpace.runs.scaling.sizes import ScalingKind, series_of
from library.published import read_published

MS = 1e6
PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "nano_cluster_gpt2_small.csv"


def _sample(nodes: int, *, strong: bool = False, name: str = "", **parts_ms: float) -> Sample:
    """Return a run with 100 ms of work on one node, or what is given."""
    parts = {**dict.fromkeys(PARTS, 0.0), "work": 100 / nodes if strong else 100.0, **parts_ms}
    step_ns, batch = sum(parts.values()) * MS, 64.0 if strong else 64.0 * nodes
    return Sample(
        name=name or f"n{nodes}",
        path=name or f"n{nodes}",
        num_nodes=nodes,
        num_ranks=nodes,
        step_ns=step_ns,
        samples_per_s=batch / step_ns * 1e9,
        batch=batch,
        parts_ns={part: value * MS for part, value in parts.items()},
        growth=tuple((k, 1.0) for k in range(1, nodes + 1)),
    )


def _ring_ms(nodes: int) -> float:
    return 30 * (nodes - 1) / nodes


def test_figures_of_sizes_are_relative_to_the_smallest() -> None:
    found = scaling_of([_sample(nodes, transfer=100.0 * (nodes > 1)) for nodes in (1, 2, 4)])
    assert [size.scaling_factor for size in found.sizes] == pytest.approx([1.0, 0.5, 0.5])
    assert [size.speedup for size in found.sizes] == pytest.approx([1.0, 1.0, 2.0])
    assert [size.further_gain for size in found.sizes] == [None, pytest.approx(0.0, abs=1e-9), pytest.approx(1.0)]
    assert [size.band for size in found.sizes] == [Band.IDEAL, Band.OVERHEAD, Band.OVERHEAD]


@pytest.mark.parametrize(("strong", "kind"), [(False, ScalingKind.WEAK), (True, ScalingKind.STRONG)])
def test_batches_tell_weak_from_strong(strong: bool, kind: ScalingKind) -> None:
    assert series_of([_sample(nodes, strong=strong) for nodes in (1, 2, 4)]).kind is kind


def test_batches_that_do_neither_are_refused_a_law_and_still_have_figures() -> None:
    samples = [replace(_sample(nodes), batch=batch) for nodes, batch in ((1, 64), (2, 64), (4, 256))]
    found = scaling_of(samples)
    assert found.kind is ScalingKind.UNKNOWN and not found.predictions and found.knee is None
    assert "64 at 1, 64 at 2, 256 at 4" in found.no_law
    assert [size.num_units for size in found.sizes] == [1, 2, 4]


@pytest.mark.parametrize("strong", [False, True])
def test_the_law_of_known_terms_has_the_truth_in_its_interval(strong: bool) -> None:
    found = scaling_of([_sample(nodes, strong=strong, transfer=_ring_ms(nodes)) for nodes in (1, 2, 4, 8)])
    for size in found.predictions:
        truth = sum((_sample(size.num_units, strong=strong, transfer=_ring_ms(size.num_units)).parts_ns or {}).values())
        low, high = size.step_interval_ns
        assert low <= truth <= high and size.step_ns == pytest.approx(truth, rel=0.1)
    assert [size.factor for size in found.predictions] == [2, 4]


def test_nothing_is_predicted_beyond_four_times_the_largest_size() -> None:
    found = scaling_of([_sample(nodes) for nodes in (1, 2, 4, 8)])
    assert max(size.num_units for size in found.predictions) == 32


@each_case(
    ("part", "strong", "of_size"),
    [
        ("transfer", False, lambda nodes: {"transfer": _ring_ms(nodes)}),
        ("jitter", False, lambda nodes: {"jitter": 10 * np.log2(nodes)}),
        ("imbalance", False, lambda nodes: {"imbalance": 15.0 * (nodes > 1)}),
        ("work", True, lambda nodes: {"work": 20 + 80 / nodes}),
        ("work", False, lambda nodes: {"work": 100 + 5 * nodes}),
        ("", False, lambda nodes: {"transfer": 0.2 * (nodes - 1)}),
    ],
)
def test_the_part_that_stops_a_job_is_named(part: str, strong: bool, of_size) -> None:
    found = scaling_of([_sample(nodes, strong=strong, **of_size(nodes)) for nodes in (1, 2, 4, 8)])
    assert found.stop is not None and found.stop.part == part


def test_the_knee_is_the_size_from_which_doubling_gives_less_than_half() -> None:
    # Amdahl: with a serial share of 1/9, the doubling of 8 gives 1/2, that of smaller ones more.
    samples = [_sample(nodes, strong=True, work=100 / 9 + 800 / 9 / nodes) for nodes in (1, 2, 4, 8, 16, 32)]
    knee = scaling_of(samples).knee
    assert knee is not None and knee.is_measured and knee.num_units is not None
    assert 4 <= knee.num_units <= 8
    assert knee.low is not None and knee.low <= knee.num_units <= (knee.high or 99)


def test_where_no_measured_doubling_fails_the_law_says_where_one_will() -> None:
    samples = [_sample(nodes, strong=True, work=3 + 97 / nodes) for nodes in (1, 2, 4, 8)]
    knee = scaling_of(samples).knee
    assert knee is not None and not knee.is_measured and knee.num_units is not None and knee.num_units > 4


def test_without_any_loss_there_is_no_knee() -> None:
    knee = scaling_of([_sample(nodes) for nodes in (1, 2, 4, 8)]).knee
    assert knee is not None and knee.num_units is None


def test_sizes_without_a_doubling_between_them_have_no_knee() -> None:
    assert scaling_of([_sample(5), _sample(6), _sample(8)]).knee is None


def test_a_size_that_is_missing_between_others_leaves_the_law_as_it_is() -> None:
    found = scaling_of([_sample(nodes, transfer=_ring_ms(nodes)) for nodes in (1, 2, 8)])
    low, high = found.predictions[0].step_interval_ns
    assert low <= (100 + _ring_ms(16)) * MS <= high


def test_repeats_narrow_what_is_known_of_a_size() -> None:
    def repeats(count: int) -> list[Sample]:
        speeds = 1 + 0.02 * np.resize([-1.0, 1.0], count)
        one = _sample(2)
        return [
            replace(one, name=f"r{row}", path=f"r{row}", step_ns=(one.step_ns or 0) * speed)
            for row, speed in enumerate(speeds)
        ]

    few, many = (series_of([_sample(1), *repeats(count)]).sizes[1] for count in (4, 16))
    assert few.run_cv == pytest.approx(0.023, abs=0.002) and many.error < few.error
    assert series_of([_sample(1), _sample(2)]).sizes[0].run_cv == pytest.approx(PRIOR_CV)


@each_case(
    ("way", "batch", "said"),
    [
        ({"hosts": "n9"}, 128.0, "hosts is n9, not n1"),
        ({}, 64.0, "batch is 64, not 128"),
        ({}, 131.0, "batch is 131, not 128"),
        ({"setting train.bucket_mb": "5"}, 128.0, "setting train.bucket_mb is 5, not 25"),
    ],
)
def test_repeats_under_other_conditions_are_not_pooled(way: dict[str, str], batch: float, said: str) -> None:
    usual = {"hosts": "n1", "setting train.bucket_mb": "25"}
    repeats = [replace(_sample(2, name=f"r{row}"), same_way=usual) for row in range(2)]
    odd = replace(_sample(2, name="odd"), same_way={**usual, **way}, batch=batch)
    found = series_of([_sample(1), *repeats, odd])
    assert [sample.name for sample in found.sizes[1].samples] == ["r0", "r1"]
    assert len(found.left_out) == 1 and "odd is not pooled" in found.left_out[0] and said in found.left_out[0]


def test_repeats_whose_samples_have_different_lengths_are_pooled() -> None:
    """A step of theirs has 0.3 % more or fewer tokens in the mean."""
    samples = [
        replace(_sample(nodes, name=f"{nodes}-{row}"), batch=10_000.0 * nodes * (1 + 0.003 * row))
        for nodes in (2, 4, 8)
        for row in (-1, 0, 1)
    ]
    found = series_of(samples)
    assert [len(size.samples) for size in found.sizes] == [3, 3, 3] and not found.left_out
    assert found.kind is ScalingKind.WEAK and found.why == "the batch of a unit is 10000 at every size"


def test_a_line_without_batch_has_that_of_its_repeats(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,throughput,nodes,batch\na,100,1,\nb,101,1,64\nc,198,2,128\nd,390,4,256\n")
    found = scaling_of([sample_of_line(line, str(path)) for line in read_csv(path)])
    assert found.kind is ScalingKind.WEAK and len(found.predictions) == 2 and not found.left_out
    assert found.sizes[0].runs == ("a", "b") and found.sizes[0].samples_per_s == pytest.approx(100.5)
    assert found.sizes[0].step_ns == pytest.approx((0.64 + 64 / 101) / 2 * 1e9)


def test_a_run_of_other_versions_is_left_out_of_all_sizes() -> None:
    samples = [replace(_sample(nodes), same_work={"version of torch": "2.13"}) for nodes in (1, 2, 4)]
    found = series_of([*samples, replace(_sample(8), same_work={"version of torch": "2.11"})])
    assert [size.num_units for size in found.sizes] == [1, 2, 4]
    assert "n8 does other work: version of torch is 2.11, not 2.13" in found.left_out[0]


def test_the_same_run_named_twice_counts_once() -> None:
    found = series_of([_sample(1), _sample(2), _sample(2)])
    assert len(found.sizes[1].samples) == 1 and "named twice" in found.left_out[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_missing": 2, "world_size": 4}, "2 of 4 ranks have no trace"),
        ({"log_p50_error": None, "log_mean_error": None, "num_steps": 5}, "has 5 steps to use: 8 are needed"),
    ],
)
def test_a_run_whose_speed_is_not_known_is_left_out(changes: dict[str, Any], said: str) -> None:
    odd = sample_of_run(sample_run("runs/odd", **changes))
    usual = sample_of_run(sample_run("runs/usual", work=(100.0, 100.0), hosts=("n0", "n1")))
    found = series_of([usual, odd])
    assert [sample.name for size in found.sizes for sample in size.samples] == ["usual"]
    assert found.left_out[0].startswith("odd ") and said in found.left_out[0]
    with pytest.raises(CannotTell, match="no run can be used"):
        series_of([odd])


def test_the_error_of_a_run_is_that_of_its_mean_step_whose_steps_may_depend_on_each_other() -> None:
    assert sample_of_run(sample_run(log_mean_error=0.02, cv=0.01)).error == 0.02
    assert sample_of_run(sample_run(log_mean_error=None, cv=0.01, num_steps=25)).error == pytest.approx(0.002)


def test_three_repeats_say_little_of_the_variation_that_they_show() -> None:
    def repeats(nodes: int) -> list[Sample]:
        one = _sample(nodes)
        return [
            replace(one, path=f"{nodes}-{row}", step_ns=(one.step_ns or 0) * (1 + error))
            for row, error in enumerate((-0.02, 0.0, 0.02))
        ]

    low, high = scaling_of([*repeats(1), *repeats(2)]).sizes[1].scaling_interval
    # Student's t with 4 degrees of freedom, of the difference of two means of three.
    assert np.log(high / low) / 2 == pytest.approx(2.776 * 0.02 * (2 / 3) ** 0.5, rel=0.01)


def test_a_kind_of_scaling_that_the_batches_contradict_is_refused() -> None:
    samples = [_sample(nodes) for nodes in (1, 2)]
    with pytest.raises(UsageError, match="the batch of a unit is 64 at every size, which is weak scaling"):
        series_of(samples, kind=ScalingKind.STRONG)
    assert series_of(samples, kind=ScalingKind.WEAK).kind is ScalingKind.WEAK


def test_a_link_to_a_run_is_no_repeat(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    repeats = [replace(_sample(2), path=str(tmp_path / name)) for name in ("run", "link")]
    assert len(series_of([_sample(1), *repeats]).sizes[1].samples) == 1


@pytest.mark.parametrize("samples", [[_sample(2)], [_sample(2), _sample(2)]])
def test_one_size_alone_cannot_tell(samples: list[Sample]) -> None:
    with pytest.raises(CannotTell, match="all runs are of one size, 2 nodes"):
        scaling_of(samples)


def test_a_law_that_misses_the_size_it_was_fitted_to_knows_its_next_ones_less_well() -> None:
    """Work that grows and shrinks again is of no known form."""
    found = scaling_of([_sample(nodes, work=work) for nodes, work in ((1, 100.0), (2, 130.0), (4, 80.0))])
    low, high = found.predictions[0].step_interval_ns
    assert low < 80 * MS and high > 130 * MS
    assert "off at 4 nodes, which it was fitted to" in found.rests_on[-1]


def test_sizes_that_no_law_fits_are_not_predicted() -> None:
    found = scaling_of([_sample(nodes, work=work) for nodes, work in ((1, 100.0), (2, 200.0), (4, 1000.0))])
    assert found.predictions == () and found.no_law.startswith("no law fits these sizes: the closest one is -")


def test_sizes_that_differ_without_bounds_are_not_predicted_either() -> None:
    samples = [_sample(nodes, strong=True, work=work) for nodes, work in ((1, 1e6), (2, 1e-6))]
    with np.errstate(over="raise", invalid="raise"):
        found = scaling_of([replace(sample, parts_ns=None) for sample in samples])
    assert found.predictions == () and found.no_law.startswith("no law fits these sizes")


def test_the_serial_share_of_strong_scaling_is_told() -> None:
    found = scaling_of([_sample(nodes, strong=True, work=20 + 80 / nodes) for nodes in (1, 2, 4, 8)])
    assert found.rests_on[0] == "own work at 4 sizes: constant + 1/n, serial share 20.0 %"


def test_noise_between_neighbouring_sizes_is_no_error_of_the_law() -> None:
    samples = [replace(_sample(nodes), parts_ns=None) for nodes in (1, 8, 64, 127)]
    odd = _sample(128)
    slower = replace(odd, step_ns=(odd.step_ns or 0) * 1.02, parts_ns=None)
    low, high = scaling_of([*samples, slower]).predictions[0].step_interval_ns
    assert high / low < 1.12


def test_two_sizes_leave_the_form_of_the_law_open() -> None:
    """A serial share and a transfer that grows fit two sizes equally well, and part at four times the larger one."""
    samples = [replace(_sample(nodes, strong=True, work=20 + 80 / nodes), parts_ns=None) for nodes in (1, 2)]
    two = scaling_of(samples).predictions[1]
    four = scaling_of(
        [replace(_sample(nodes, strong=True, work=20 + 80 / nodes), parts_ns=None) for nodes in (1, 2, 4, 8)]
    ).predictions[1]
    width = [(size.step_interval_ns[1] - size.step_interval_ns[0]) / size.step_ns for size in (two, four)]
    assert width[0] > 2 * width[1]
    assert two.step_interval_ns[0] <= (20 + 80 / 8) * MS <= two.step_interval_ns[1]


def test_runs_that_count_different_things_are_refused() -> None:
    with pytest.raises(UsageError, match="count images and tokens"):
        series_of([replace(_sample(1), unit="tokens"), replace(_sample(2), unit="images")])


def test_nodes_with_different_numbers_of_ranks_are_counted_by_rank() -> None:
    samples = [replace(_sample(1), num_ranks=1), replace(_sample(1, name="b"), num_ranks=2), _sample(4)]
    series = series_of(samples)
    assert series.unit == "rank" and [size.num_units for size in series.sizes] == [1, 2, 4]


def test_without_parts_the_law_is_of_the_step_time_alone() -> None:
    samples = [replace(_sample(nodes, strong=True), parts_ns=None, unknown="no phases") for nodes in (1, 2, 4, 8)]
    found = scaling_of(samples)
    assert found.stop is None and found.no_parts == "no phases"
    low, high = found.predictions[0].step_interval_ns
    assert low <= 100 / 16 * MS <= high and list(found.predictions[0].parts_ns) == ["total"]


def test_a_probe_lets_transfers_grow_as_it_has_measured() -> None:
    """Its latency of each hop shows only on more nodes than were measured: 64 hops of 1 ms there, 8 here."""
    samples = [_sample(nodes, transfer=8.0 * (nodes > 1)) for nodes in (1, 2, 4, 8)]
    samples = [replace(sample, calls=(("all_reduce", 4096.0, 1.0),)) for sample in samples]
    probe = made_probe()
    laws = [
        replace(probe.laws[0], op="all_reduce", num_nodes=nodes, pieces=(_piece(1.0 * MS * (nodes - 1)),))
        for nodes in (2, 4, 8)
    ]
    alone, probed = (scaling_of(samples, probe=one).predictions[1] for one in (None, replace(probe, laws=tuple(laws))))
    assert probed.step_interval_ns[1] > (100 + 31) * MS > alone.step_interval_ns[1]
    assert any(
        "by the probe of 4 hosts" in words
        for words in scaling_of(samples, probe=replace(probe, laws=tuple(laws))).rests_on
    )


def _piece(latency_ns: float) -> LawPiece:
    names = ("latency_ns", "latency_low_ns", "latency_high_ns")
    zeros = ("from_bytes", "from_low_bytes", "from_high_bytes", "ns_per_byte", "ns_per_byte_low", "ns_per_byte_high")
    return LawPiece(**dict.fromkeys(names, latency_ns), **dict.fromkeys(zeros, 0.0))


def test_a_probe_without_these_operations_changes_nothing() -> None:
    samples = [_sample(nodes, transfer=_ring_ms(nodes)) for nodes in (1, 2, 4, 8)]
    assert scaling_of(samples, probe=made_probe()).predictions == scaling_of(samples).predictions


def test_a_law_that_was_wrong_at_the_largest_size_has_wider_intervals() -> None:
    smooth = [_sample(nodes, transfer=_ring_ms(nodes)) for nodes in (1, 2, 4, 8)]
    jump = [*smooth[:3], _sample(8, transfer=90.0)]
    width = [
        (found.high_ns[1] - found.low_ns[1]) / found.step_ns[1]
        for found in (predict(series_of(samples), [16, 32]) for samples in (smooth, jump))
    ]
    assert width[1] > 1.5 * width[0]


@each_case(
    ("factor", "ratio", "expected"),
    [
        (1.0, 1, Band.IDEAL),
        (0.96, 4, Band.IDEAL),
        (0.946, 4, Band.IDEAL),  # which is printed as 0.95
        (0.944, 4, Band.OVERHEAD),
        (0.8, 4, Band.OVERHEAD),
        (0.249, 4, Band.OVERHEAD),  # 1.00 times as fast
        (0.2, 4, Band.DETRIMENTAL),
    ],
)
def test_bands(factor: float, ratio: float, expected: Band) -> None:
    assert band(factor, ratio) is expected


def test_the_published_study_has_what_it_found_in_the_bands() -> None:
    """Data parallelism within a server is the only set-up that pays; all over two servers of one GPU are slower."""
    found = {
        (str(row.layout), row.parallelism): band(row.scaling_factor, row.layout.num_ranks)
        for row in read_published(PUBLISHED)
    }
    assert found["1x2", "data"] is Band.OVERHEAD
    assert {found[layout] for layout in found if layout[0] == "2x1"} == {Band.DETRIMENTAL}


def test_throughputs_and_step_times_need_a_batch_to_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,nodes,step_time_s,throughput\na,1,1,\nb,2,,100\n")
    with pytest.raises(CannotTell, match="add their batches"):
        scaling_of([sample_of_line(line, str(path)) for line in read_csv(path)], kind=ScalingKind.WEAK)


def test_a_csv_file_needs_no_traces(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\nd,8,560,512\n")
    found = scaling_of([sample_of_line(line, str(path)) for line in read_csv(path)])
    assert found.kind is ScalingKind.WEAK and found.sizes[-1].speedup == pytest.approx(5.6)
    assert len(found.predictions) == 2


def test_step_times_without_batch_need_to_know_how_the_work_grows(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,nodes,step_time_s\na,1,1.0\nb,2,0.6\nc,4,0.4\n")
    samples = [sample_of_line(line, str(path)) for line in read_csv(path)]
    with pytest.raises(CannotTell, match="--scaling weak"):
        scaling_of(samples)
    assert scaling_of(samples, kind=ScalingKind.STRONG).sizes[-1].speedup == pytest.approx(2.5)


def test_the_table_has_a_row_for_each_size_and_for_each_prediction() -> None:
    rows = list(rows_of(scaling_of([_sample(nodes, transfer=_ring_ms(nodes)) for nodes in (1, 2, 4)])))
    assert [row[0] for row in rows] == [1, 2, 4, 8, 16] and {len(row) for row in rows} == {len(COLUMNS)}
    assert [row[COLUMNS.index("is_predicted")] for row in rows] == [0, 0, 0, 1, 1]
