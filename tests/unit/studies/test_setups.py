"""The set-ups of the studies, and their place in the plan of a training."""

from __future__ import annotations

import dataclasses

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError, UsageError
from hpcpace.studies.setups import (
    MODEL_SIZES,
    NanoCluster,
    Setup,
    model_size_setups,
    parse_layout,
    planned,
    repeated,
    settings_of,
    shrunk,
)
from hpcpace.train.settings import GPT2_PRESETS, RESNET18, TrainConfig

DATA = Setup(model="gpt2", preset="small", layout=parse_layout("2x2"), parallelism="data", batch=8)
PIPELINE = dataclasses.replace(DATA, parallelism="pipeline")


def test_the_sweep_is_that_of_the_published_study() -> None:
    setups = NanoCluster().setups()
    texts = [setup for setup in setups if setup.model == "gpt2"]
    images = [setup for setup in setups if setup.model == "resnet18"]
    assert {str(setup.layout) for setup in setups} == {"1x1", "1x2", "2x1", "2x2"}
    assert {setup.batch for setup in texts} == {4, 8, 16}
    assert {setup.batch for setup in images} == {32, 64, 128, 256, 512, 1024, 2048}
    assert [len(texts), len(images)] == [3 + 3 * 3 * 3, 4 * 7]
    assert len({setup.name for setup in setups}) == len(setups)


def test_every_set_up_has_a_plan() -> None:
    for setup in (*NanoCluster().setups(), *model_size_setups(batch=16), *model_size_setups(batch=16, shrink=16)):
        assert planned(setup).mesh.size == setup.layout.num_ranks


def test_repetitions_come_one_after_the_other_over_all_set_ups() -> None:
    runs = repeated([DATA, PIPELINE], 2)
    assert [(run.setup.parallelism, run.repetition) for run in runs] == [
        *(("data", 0), ("pipeline", 0), ("data", 1), ("pipeline", 1))
    ]
    assert runs[0].name == "gpt2-small-2x2-data-b8-r0"


def test_steps_of_each_set_up_come_behind_its_warm_up() -> None:
    (run,) = repeated([dataclasses.replace(DATA, warmup_steps=3)], 1, steps_of=lambda setup: setup.batch)
    assert (run.setup.steps, run.setup.warmup_steps) == (11, 3)


def test_the_batch_is_that_of_a_replica() -> None:
    assert planned(DATA).settings.batch_size == 32
    assert planned(DATA).sequences_per_replica == 8
    assert planned(PIPELINE).settings.batch_size == 8


@each_case(("batch", "microbatches"), [(16, 4), (4, 4), (6, 3), (2, 2), (5, 1)])
def test_a_pipeline_cuts_a_batch_into_up_to_four_even_pieces(batch: int, microbatches: int) -> None:
    assert dataclasses.replace(PIPELINE, batch=batch).microbatches == microbatches


def test_what_a_set_up_does_not_say_is_the_users() -> None:
    settings = settings_of(DATA, TrainConfig(dtype="bfloat16", seed=7))
    assert (settings.dtype, settings.seed, settings.preset, settings.mesh) == ("bfloat16", 7, "small", "dp=4")


@each_case("preset", MODEL_SIZES)
def test_a_shrunk_model_keeps_layers_and_heads_and_the_ratios_of_its_volumes(preset: str) -> None:
    shape = GPT2_PRESETS[preset]
    small = shrunk(shape, 16)
    assert (small.num_layers, small.num_heads) == (shape.num_layers, shape.num_heads)
    for of in (
        lambda one: one.num_layers * 12 * one.width**2,  # parameters of blocks
        lambda one: one.vocabulary * one.width,
        lambda one: one.context * one.width,  # activations of a sequence
    ):
        assert of(shape) / of(small) == pytest.approx(256, rel=0.001)
    small_net = shrunk(RESNET18, 8)
    assert RESNET18.num_parameters / small_net.num_parameters == pytest.approx(64, rel=0.02)


def test_a_run_says_that_its_model_is_a_shrunk_one() -> None:
    assert (planned(DATA).preset, "shrink" in planned(DATA).facts()) == ("small", False)
    facts = planned(dataclasses.replace(DATA, shrink=16)).facts()
    assert (facts["preset"], facts["shrink"], facts["width"]) == ("small-shrunk-16", 16, 48)


def test_refuses_to_divide_a_width_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="take a divisor of 64"):
        shrunk(GPT2_PRESETS["small"], 48)
    with pytest.raises(ConfigError, match="cannot be divided by 3"):
        shrunk(RESNET18, 3)


@each_case("text", ["", "2", "2x", "x2", "0x2", "2x2x2", "axb", "-1x2"])
def test_refuses_what_is_no_layout(text: str) -> None:
    with pytest.raises(UsageError, match="like 2x1"):
        parse_layout(text)


@each_case(("layout", "parallelism"), [("1x1", "data"), ("2x1", "none"), ("2x1", "zero")])
def test_refuses_a_parallelism_that_does_not_fit(layout: str, parallelism: str) -> None:
    with pytest.raises(UsageError, match="parallelism"):
        Setup(model="gpt2", preset="small", layout=parse_layout(layout), parallelism=parallelism, batch=4)
