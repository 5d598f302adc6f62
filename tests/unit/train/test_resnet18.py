from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hpcpace.train.models import ResNet, build_resnet  # noqa: E402
from hpcpace.train.parallel import build_stage  # noqa: E402
from hpcpace.train.settings import GPT2_PRESETS, RESNET18  # noqa: E402


def _images(num_images: int = 2):
    return torch.randn(num_images, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_model_has_the_parameters_of_its_shape_in_their_order():
    with torch.device("meta"):
        model = ResNet(RESNET18)
    assert [parameter.numel() for parameter in model.parameters()] == RESNET18.parameter_sizes()


def test_the_image_is_halved_in_three_stages():
    model = build_resnet(RESNET18, seed=0)
    sizes = []
    for block in model.pieces():
        block.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape[1:])))
    assert model(_images()).shape == (2, 10)
    expected = [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    assert sizes == [shape for shape in expected for _ in range(2)]


def test_parameters_follow_from_the_seed():
    first, again, other = (build_resnet(RESNET18, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv.weight"], other["conv.weight"])


def test_the_first_loss_is_near_that_of_guessing():
    loss = build_resnet(RESNET18, seed=0)(_images(16), torch.arange(16) % 10)
    assert loss.item() == pytest.approx(math.log(10), rel=0.2)


def test_a_block_adds_its_input():
    model = build_resnet(RESNET18, seed=0).eval()
    block, hidden = model.blocks[0], torch.rand(1, 64, 8, 8)
    with torch.no_grad():
        block.conv_2.weight.zero_()
        torch.testing.assert_close(block(hidden), hidden)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    model = build_resnet(RESNET18, seed=0, dtype=torch.bfloat16)
    assert model(_images().bfloat16(), torch.tensor([1, 2])).dtype == torch.float32


def test_each_shape_has_its_model():
    assert type(build_stage(RESNET18, seed=0)).__name__ == "ResNet"
    assert type(build_stage(GPT2_PRESETS["tiny"], seed=0)).__name__ == "GPT2"
    with pytest.raises(ValueError, match="one stage"):
        build_stage(RESNET18, seed=0, num_stages=2)
