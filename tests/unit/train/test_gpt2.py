from __future__ import annotations

import math

import pytest
from cases import each_case

torch = pytest.importorskip("torch")

from hpcpace.train.models import GPT2, NextTokenLoss, build_gpt2  # noqa: E402
from hpcpace.train.settings import GPT2_PRESETS  # noqa: E402

TINY = GPT2_PRESETS["tiny"]


def _tokens(num_sequences: int = 2, seed: int = 0):
    return torch.randint(256, (num_sequences, 33), generator=torch.Generator().manual_seed(seed))


@each_case("preset", GPT2_PRESETS)
def test_the_model_has_the_parameters_of_its_shape(preset):
    shape = GPT2_PRESETS[preset]
    with torch.device("meta"):
        model = GPT2(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters


def test_parameters_follow_from_the_seed():
    first, again, other = (build_gpt2(TINY, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.wte.weight"], other["embedding.wte.weight"])


def test_stages_start_from_the_parameters_of_the_whole_model():
    whole = build_gpt2(TINY, seed=0).state_dict()
    stages = [build_gpt2(TINY, seed=0, stage=stage, num_stages=3).state_dict() for stage in range(3)]
    assert set().union(*stages) == set(whole)
    assert all(torch.equal(tensor, whole[name]) for stage in stages for name, tensor in stage.items())


def test_stages_in_a_row_compute_the_whole_model():
    tokens = _tokens()
    expected = build_gpt2(TINY, seed=0)(tokens[:, :-1], tokens[:, 1:])
    hidden = tokens[:, :-1]
    for stage in range(4):
        model = build_gpt2(TINY, seed=0, stage=stage, num_stages=4)
        hidden = model(hidden) if stage < 3 else model(hidden, tokens[:, 1:])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


def test_the_head_shares_the_weight_of_the_token_embedding():
    model = build_gpt2(TINY, seed=0)
    assert model.head.vocabulary.weight is model.embedding.wte.weight


def test_the_first_loss_is_that_of_guessing():
    tokens = _tokens()
    assert build_gpt2(TINY, seed=0)(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256), rel=0.02)


def test_a_position_sees_no_later_token():
    tokens = _tokens(1)
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    model = build_gpt2(TINY, seed=0)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20], after[:, 20])


def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    logits, targets = torch.randn(2, 3, 7).bfloat16(), torch.randint(7, (2, 3))
    loss = NextTokenLoss()(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, NextTokenLoss()(logits.float(), targets))
