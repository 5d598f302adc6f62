from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.errors import MeshError
from hpcpace.train.settings import GPT2_PRESETS, PRESETS, RESNET18, Mesh


def test_every_preset_of_the_settings_has_a_shape() -> None:
    assert set(GPT2_PRESETS) == set(PRESETS)


def test_small_is_gpt2_with_124_million_parameters() -> None:
    small = GPT2_PRESETS["small"]
    assert (small.num_layers, small.width, small.num_heads) == (12, 768, 12)
    assert (small.context, small.vocabulary) == (1024, 50257)
    assert small.num_parameters == 124_439_808


@each_case(
    ("preset", "num_layers", "width", "num_heads", "num_parameters"),
    [
        # Layers and width are of Radford et al. 2019, table 2; heads and counts those of the published weights.
        ("medium", 24, 1024, 16, 354_823_168),
        ("large", 36, 1280, 20, 774_030_080),
        ("xl", 48, 1600, 25, 1_557_611_200),
    ],
)
def test_larger_presets_are_those_of_gpt2(
    preset: str, num_layers: int, width: int, num_heads: int, num_parameters: int
) -> None:
    shape = GPT2_PRESETS[preset]
    assert (shape.num_layers, shape.width, shape.num_heads) == (num_layers, width, num_heads)
    assert (shape.context, shape.vocabulary, shape.num_parameters) == (1024, 50257, num_parameters)


def test_resnet18_has_the_parameters_that_are_usual_for_cifar10() -> None:
    assert RESNET18.num_parameters == 11_173_962


@each_case("mesh", [Mesh(pp=2), Mesh(tp=2), Mesh(dp=2, pp=2)])
def test_resnet18_is_not_cut(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=f"use dp={mesh.size}"):
        RESNET18.check_mesh(mesh)


@each_case("num_stages", [1, 2, 3, 5, 12])
def test_stages_have_each_layer_once_and_in_order(num_stages: int) -> None:
    small = GPT2_PRESETS["small"]
    stages = [small.stage_layers(stage, num_stages) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(12))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@each_case(("mesh", "seen"), [(Mesh(pp=5), "layers (4)"), (Mesh(tp=3), "tp of 1, 2, 4"), (Mesh(tp=8), "4 heads")])
def test_refuses_a_mesh_over_which_the_model_cannot_be_cut(mesh: Mesh, seen: str) -> None:
    with pytest.raises(MeshError) as caught:
        GPT2_PRESETS["tiny"].check_mesh(mesh)
    assert seen in str(caught.value)
