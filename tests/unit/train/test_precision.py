from __future__ import annotations

import pytest
import torch
from cases import each_case

from hpcpace.core.errors import ConfigError
from hpcpace.train.models import BatchNorm2d, LayerNorm, autocast, master_dtype, sharding_policy
from hpcpace.train.parallel import build_stage
from hpcpace.train.settings import DTYPES, GPT2_PRESETS, RESNET18, SHORT_DTYPES, TrainConfig

CPU = torch.device("cpu")
TINY = GPT2_PRESETS["tiny"]


def mixed(shape):
    model = build_stage(shape, seed=0, dtype=master_dtype("bfloat16"))
    autocast(model, "bfloat16", CPU)
    return model


def inputs_of(shape):
    if shape is RESNET18:
        return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    tokens = torch.arange(18).reshape(2, 9)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("shape", [TINY, RESNET18], ids=["gpt2", "resnet18"])
def test_pieces_compute_in_bfloat16_and_everything_that_is_kept_stays_in_float32(shape):
    model, seen = mixed(shape), []
    pieces = [piece for piece in model.pieces() if piece is not getattr(model, "head", None)]
    for piece in pieces:
        piece.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    loss = model(*inputs_of(shape))
    loss.backward()
    assert seen == [torch.bfloat16] * len(pieces)
    assert loss.dtype == torch.float32
    kept = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}


def test_nobody_else_computes_under_autocast():
    model, seen = mixed(TINY), []
    loss = model(*inputs_of(TINY))
    next(model.pieces()).attn.qkv.weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    loss.backward()
    assert seen == [False]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_type_for_all_needs_no_autocast(dtype):
    model = build_stage(TINY, seed=0, dtype=master_dtype(dtype))
    autocast(model, dtype, CPU)
    assert model(*inputs_of(TINY)).dtype == getattr(torch, dtype)
    assert "forward" not in vars(model)
    assert sharding_policy(dtype).param_dtype is None


def test_a_stage_in_the_middle_hands_on_what_it_gets_in_bfloat16():
    stage = build_stage(TINY, seed=0, stage=1, num_stages=4)
    autocast(stage, "bfloat16", CPU)
    assert stage(torch.randn(2, 8, TINY.width, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_layer_norm_keeps_the_type_of_the_hidden_state():
    norm = LayerNorm(16)
    hidden = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(hidden.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(norm(hidden), torch.nn.LayerNorm(16)(hidden))


def test_a_batch_norm_is_that_of_torch_also_with_weights_in_bfloat16():
    images = torch.randn(4, 3, 8, 8)
    ours, theirs = BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    assert torch.equal(ours(images), theirs(images))
    assert {name: value.tolist() for name, value in ours.named_buffers()} == {
        name: value.tolist() for name, value in theirs.named_buffers()
    }
    assert torch.equal(ours.eval()(images), theirs.eval()(images))
    for parameter in ours.parameters():
        parameter.data = parameter.data.bfloat16()
    assert ours.train()(images.bfloat16()).dtype == torch.bfloat16
    assert ours.running_mean.dtype == torch.float32


@each_case(("short", "dtype"), SHORT_DTYPES.items())
def test_a_short_name_is_the_same_setting(short, dtype):
    assert TrainConfig(dtype=short) == TrainConfig(dtype=dtype)
    assert dtype in DTYPES


@each_case("dtype", ["fp16", "half", "BF16", ""])
def test_refuses_other_types(dtype):
    with pytest.raises(ConfigError, match=r"train\.dtype is .*: choose one of float32, bfloat16, float64"):
        TrainConfig(dtype=dtype)
