"""The ratio of communication to computation, the link rate that follows, and what the published values imply."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_study import write_study

from hpcpace.core.errors import DataError
from hpcpace.studies.setups import NanoCluster, Setup, parse_layout, planned
from hpcpace.train.settings import GPT2_PRESETS
from library.figures import study_figures
from library.published import (
    BATCH,
    Balance,
    bytes_per_sample,
    image_facts,
    link_bytes_per_step,
    link_rate_bps,
    predicted_step_s,
    published_balance,
    published_volume_gbyte,
    read_published,
    tokens_per_s_of_one,
    verdict,
)

PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "nano_cluster_gpt2_small.csv"


@pytest.fixture(scope="module")
def rows():
    return {(str(row.layout), row.parallelism): row for row in read_published(PUBLISHED)}


def setup(layout: str, parallelism: str, *, batch: int = BATCH, shrink: int = 16) -> Setup:
    return Setup(
        model="gpt2", preset="small", layout=parse_layout(layout), parallelism=parallelism, batch=batch, shrink=shrink
    )


def test_the_ratio_is_time_on_the_link_over_time_of_computation() -> None:
    # 1000 bytes a sample take 8 ms at 1 Mb/s; two ranks of 500 samples/s take 1 ms a sample.
    balance = Balance(link_bytes_per_sample=1000, samples_per_s_of_one=500, num_ranks=2, link_bps=1e6)
    assert (balance.communication_s, balance.computation_s) == (pytest.approx(8e-3), pytest.approx(1e-3))
    assert balance.ratio == pytest.approx(8)


def test_the_link_rate_gives_the_ratio_that_it_was_computed_from() -> None:
    rate = link_rate_bps(7.16, link_bytes_per_sample=1009, samples_per_s_of_one=2560, num_ranks=2)
    balance = Balance(link_bytes_per_sample=1009, samples_per_s_of_one=2560, num_ranks=2, link_bps=rate)
    assert balance.ratio == pytest.approx(7.16)


def test_bytes_a_sample_follow_from_two_throughputs() -> None:
    assert bytes_per_sample(1.6e9, 1e4) == pytest.approx(20_000)


def test_the_published_scaling_factors_agree_on_one_gpu(rows) -> None:
    one = tokens_per_s_of_one(list(rows.values()))
    assert one.num == 5
    assert one.low > 29_000 and one.high < 31_000


def test_the_published_volume_of_data_parallelism_is_that_of_16_sequences_a_replica(rows) -> None:
    gradients_bytes = 4 * GPT2_PRESETS["small"].num_parameters
    # Two ranks: each sends 2 (N-1)/N of it, and both directions count.
    volume = 2 * gradients_bytes / (2 * BATCH * 1024)
    assert rows["2x1", "data"].network_bytes_per_sample == pytest.approx(volume, rel=0.01)


def test_the_published_volume_of_a_pipeline_is_activations_of_2_bytes_and_the_tied_weight_of_4(rows) -> None:
    shape = GPT2_PRESETS["small"]
    volume = 2 * 2 * shape.width + 2 * 4 * shape.vocabulary * shape.width / (BATCH * 1024)
    assert rows["2x1", "pipeline"].network_bytes_per_sample == pytest.approx(volume, rel=0.01)


def test_the_published_ratios_explain_the_published_throughputs(rows) -> None:
    one = tokens_per_s_of_one(list(rows.values())).median
    for parallelism in ("data", "tensor"):  # a pipeline has its bubble besides
        row = rows["2x1", parallelism]
        balance = published_balance(row, one)
        without_overlap = 1 / (balance.computation_s + balance.communication_s)
        assert row.tokens_per_s == pytest.approx(without_overlap, rel=0.15)


def test_there_is_no_published_ratio_within_one_server(rows) -> None:
    with pytest.raises(DataError, match="no network traffic for 1x2 data"):
        published_balance(rows["1x2", "data"], 29_500)


def test_the_published_line_goes_through_both_of_its_ends() -> None:
    assert [published_volume_gbyte(layers) for layers in (12, 24, 48)] == [174, pytest.approx(226), 330]


def test_a_missing_table_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="restore it"):
        read_published(tmp_path / "none.csv")


def test_nothing_crosses_the_link_of_a_single_server() -> None:
    one = setup("1x2", "data")
    assert link_bytes_per_step(one, planned(one)) == 0


def test_a_ring_over_two_servers_crosses_the_link_once_in_each_direction() -> None:
    by_layout = {layout: setup(layout, "data") for layout in ("2x1", "2x2")}
    volumes = {layout: link_bytes_per_step(one, planned(one)) for layout, one in by_layout.items()}
    gradients_bytes = 4 * planned(by_layout["2x1"]).shape.num_parameters
    # 2 (N-1)/N of the gradients, 5 % of frames around them, and what announces each of the scaled buckets
    assert volumes["2x1"] == pytest.approx(gradients_bytes, rel=0.07)
    assert volumes["2x2"] == pytest.approx(1.5 * gradients_bytes, rel=0.07)


def test_resnet18_sends_its_gradients() -> None:
    images = Setup(model="resnet18", layout=parse_layout("2x1"), parallelism="data", batch=4, shrink=8)
    gradients_bytes = 4 * planned(images).shape.num_parameters
    assert link_bytes_per_step(images, planned(images)) == pytest.approx(gradients_bytes, rel=0.06)


def test_tensor_parallelism_sends_most_in_the_lab_as_published() -> None:
    volumes = {
        parallelism: link_bytes_per_step(one, planned(one)) / planned(one).samples_per_step
        for parallelism in ("data", "tensor", "pipeline")
        for one in (setup("2x1", parallelism),)
    }
    assert sorted(volumes, key=volumes.__getitem__) == ["pipeline", "data", "tensor"]


def test_a_step_takes_its_computation_and_its_communication() -> None:
    one = setup("2x1", "data")
    plan = planned(one)
    computation_s = predicted_step_s(one, plan, samples_per_s_of_one=1000, link_bps=1e15)
    assert computation_s == pytest.approx(BATCH * 64 / 1000)
    slow_s = predicted_step_s(one, plan, samples_per_s_of_one=1000, link_bps=1e6)
    assert slow_s - computation_s == pytest.approx(8 * link_bytes_per_step(one, plan) / 1e6)


@pytest.mark.parametrize(
    ("ours", "theirs", "digits", "expected"),
    [
        (0.92, 0.93, 2, "0.99, agrees"),
        (0.63, 0.39, 2, "1.62, differs"),
        (0.005, 0.01, 2, "0.50, agrees"),  # 0.01 may be 0.005
        (0.003, 0.01, 2, "0.30, differs"),
        (None, 0.5, 2, ""),
        (0.5, None, 2, ""),
    ],
)
def test_figures_agree_within_a_quarter_and_the_last_digit(ours, theirs, digits, expected) -> None:
    assert verdict(ours, theirs, digits=digits) == expected


def test_the_published_facts_of_images_are_compared(tmp_path: Path) -> None:
    layouts = tuple(map(parse_layout, ("1x1", "1x2", "2x2")))
    setups = NanoCluster(batches=(), image_batches=(32, 128, 2048), layouts=layouts).setups()
    rows, _ = study_figures(write_study(tmp_path / "study", setups, bytes_per_s=1_000_000))
    facts = image_facts(rows)
    assert [fact[0] for fact in facts] == [
        "highest scaling factor at 1x2",
        "throughput at 2x2 over that at 1x2, batch 2048",
        "throughput at 2x2 over that of one rank, batch 2048",
        "1x2 is ahead of one rank",
        "2x2 is ahead of one rank",
    ]
    assert {fact[2] for fact in facts} == {"0.9", "1.16", "2.09", "not with small batches"}
