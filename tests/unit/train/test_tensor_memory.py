"""The memory of tensors: each storage once, what backward needs at most, and the state of an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcpace.studies.setups import Setup, parse_layout, planned
from hpcpace.train.data_parallel import build_optimizer
from hpcpace.train.models import ActivationMeter, TensorMemory, autocast, state_bytes, tensor_bytes
from hpcpace.train.parallel import build_stage
from library.published import expected_tensor_bytes


def test_a_storage_counts_once() -> None:
    whole = torch.zeros(10)
    assert tensor_bytes([whole, whole[2:], None, whole.view(2, 5)]) == 40


def test_what_two_microbatches_save_at_once_adds_up_and_one_after_the_other_does_not() -> None:
    layer = nn.Linear(3, 3)
    together, apart = ActivationMeter(layer.parameters()), ActivationMeter(layer.parameters())
    with together.measuring():
        losses = [(layer(torch.randn(5, 3)) ** 2).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    with apart.measuring():
        for _ in range(2):
            (layer(torch.randn(5, 3)) ** 2).sum().backward()
    assert together.peak_bytes == 2 * apart.peak_bytes
    # The input of the layer, and the output, which is squared; the weight is a parameter.
    assert apart.peak_bytes == 2 * 5 * 3 * 4


def test_adamw_keeps_two_moments_of_each_parameter() -> None:
    layer = nn.Linear(30, 30)
    optimizer = build_optimizer(layer.parameters(), learning_rate=0.1)
    layer(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == pytest.approx(2 * tensor_bytes(layer.parameters()), rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_has_the_memory_of_the_formula(dtype: str) -> None:
    setup = Setup(model="gpt2", preset="tiny", layout=parse_layout("1x1"), parallelism="none", batch=2, dtype=dtype)
    plan = planned(setup)
    model = build_stage(plan.shape, seed=0)
    autocast(model, dtype, torch.device("cpu"))
    optimizer, meter = build_optimizer(model.parameters(), learning_rate=0.1), ActivationMeter(model.parameters())
    tokens = torch.randint(0, plan.shape.vocabulary, (2, plan.seq_len))
    with meter.measuring():
        model(tokens, tokens).backward()
    optimizer.step()
    found = TensorMemory(
        parameters_bytes=tensor_bytes(model.parameters()),
        gradients_bytes=tensor_bytes(parameter.grad for parameter in model.parameters()),
        optimizer_bytes=state_bytes(optimizer),
        activations_bytes=meter.peak_bytes,
    )
    assert sum(found.facts().values()) == pytest.approx(
        expected_tensor_bytes(setup), rel=0.02 if dtype == "float32" else 0.15
    )
