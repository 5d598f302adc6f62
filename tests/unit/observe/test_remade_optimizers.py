"""Optimizers that a script makes anew, for rounds, folds and phases or in each iteration: as many steps as updates."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.observe.settings import TraceConfig
from hpcpace.observe.training_calls import MAX_FREE, Optimizers

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def _model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def federated_rounds() -> int:
    """Train a copy of the global model for five updates in each of six rounds, and average it in."""
    model = _model()
    for _ in range(6):
        client = copy.deepcopy(model)
        optimizer = SGD(client.parameters(), lr=0.1)
        for _ in range(5):
            _update(client, optimizer)
        model.load_state_dict(client.state_dict())
    return 30


def federated_rounds_of_one_model() -> int:
    model = _model()
    for _ in range(6):
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            _update(model, optimizer)
    return 30


def one_in_each_iteration() -> int:
    model = _model()
    for _ in range(30):
        _update(model, SGD(model.parameters(), lr=0.1))
    return 30


def adam_and_then_sgd_over_the_same_parameters() -> int:
    model = _model()
    optimizer: torch.optim.Optimizer = Adam(model.parameters())
    for _ in range(13):
        _update(model, optimizer)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        _update(model, optimizer)
    return 20


def swapped_every_third_update() -> int:
    model = _model()
    for phase in range(8):
        optimizer = (SGD if phase % 2 else Adam)(model.parameters(), lr=0.1)
        for _ in range(3):
            _update(model, optimizer)
    return 24


def adam_is_kept_while_sgd_steps() -> int:
    model = _model()
    first, second = Adam(model.parameters()), SGD(model.parameters(), lr=0.1)
    for step in range(20):
        _update(model, first if step < 13 else second)
    return 20


def adam_and_sgd_take_turns() -> int:
    model = _model()
    optimizers = Adam(model.parameters()), SGD(model.parameters(), lr=0.1)
    for step in range(40):
        _update(model, optimizers[step // 5 % 2])
    return 40


def adam_and_sgd_take_turns_below_an_outer_one() -> int:
    """Let an outer optimizer step after every tenth update."""
    model = _model()
    optimizers = Adam(model.parameters()), SGD(model.parameters(), lr=0.1)
    outer = SGD(model.parameters(), lr=0.7, momentum=0.9)
    for step in range(60):
        _update(model, optimizers[step // 5 % 2])
        if step % 10 == 9:
            outer.step()
    return 60


def clients_with_models_of_their_own() -> int:
    """Train seven clients that live as long as the job, one after the other, for five updates a round."""
    clients = [_model() for _ in range(7)]
    optimizers = [SGD(client.parameters(), lr=0.1) for client in clients]
    for _ in range(3):
        for client, optimizer in zip(clients, optimizers, strict=True):
            for _ in range(5):
                _update(client, optimizer)
    return 3 * 7 * 5


def two_clients_with_models_of_their_own() -> int:
    clients = [_model() for _ in range(2)]
    optimizers = [SGD(client.parameters(), lr=0.1) for client in clients]
    for step in range(60):
        _update(clients[step // 3 % 2], optimizers[step // 3 % 2])
    return 60


def trials_of_several_widths() -> int:
    """Train a model for a few updates, and then others of other shapes, as a search for hyperparameters does."""
    for width in range(2, 10):
        model = _model(width)
        optimizer = Adam(model.parameters())
        for _ in range(5):
            _update(model, optimizer)
    return 8 * 5


def trials_that_are_kept() -> int:
    kept = []
    for width in range(2, 10):
        model = _model(width)
        optimizer = Adam(model.parameters())
        for _ in range(12):
            _update(model, optimizer)
        kept.append(optimizer)
    return 8 * 12


def models_of_one_shape_that_train_in_turn() -> int:
    models = [_model() for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            _update(model, optimizer)
    return 20


def folds_with_adversaries() -> int:
    """Train a pair of models in turn, both made anew in each fold, whose optimizers wait for the garbage collection."""
    for _ in range(4):
        models = [_model(), _model(width=5)]
        optimizers: list[Any] = [Adam(model.parameters()) for model in models]
        for optimizer in optimizers:
            optimizer.itself = optimizer
        for _ in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                _update(model, optimizer)
    return 24


def inner_and_outer_over_the_same_parameters() -> int:
    """Let an outer optimizer step after every fifth update, as DiLoCo does."""
    model = _model()
    inner, outer = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.7, momentum=0.9)
    for step in range(30):
        _update(model, inner)
        if step % 5 == 4:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            outer.step()
            outer.zero_grad()
    return 30


def one_a_parameter_inside_backward_anew_each_round() -> int:
    model = _model()
    for _ in range(4):
        optimizers = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda own, known=optimizers: known[own].step())
            for parameter in model.parameters()
        ]
        for _ in range(5):
            model(torch.rand(4, 3)).square().mean().backward()
            model.zero_grad()
        for handle in handles:
            handle.remove()
    return 20


LOOPS: dict[Callable[[], int], str] = {
    federated_rounds: "SGD, after each backward pass",
    federated_rounds_of_one_model: "SGD, after each backward pass",
    one_in_each_iteration: "SGD, after each backward pass",
    adam_and_then_sgd_over_the_same_parameters: "Adam, after each backward pass; at other times SGD",
    swapped_every_third_update: "Adam, after each backward pass; at other times SGD",
    adam_is_kept_while_sgd_steps: "SGD, after each backward pass; at other times Adam",
    adam_and_sgd_take_turns: "Adam, after each backward pass; at other times SGD",
    adam_and_sgd_take_turns_below_an_outer_one: "Adam, after each backward pass; at other times SGD",
    clients_with_models_of_their_own: "SGD, after each backward pass",
    two_clients_with_models_of_their_own: "SGD, after each backward pass",
    trials_of_several_widths: "Adam, after each backward pass",
    trials_that_are_kept: "Adam, after each backward pass",
    models_of_one_shape_that_train_in_turn: "SGD then SGD, in turn, each after its own backward pass",
    folds_with_adversaries: "Adam then Adam, in turn, each after its own backward pass",
    inner_and_outer_over_the_same_parameters: "SGD, after each backward pass",
    one_a_parameter_inside_backward_anew_each_round: "4 of SGD inside backward, after each backward pass",
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_as_many_steps_as_updates(loop: Callable[[], int], tmp_path: Path) -> None:
    config = Config(TraceConfig(counters=False, snapshot=False))
    with hpcpace.session(run_dir=tmp_path, config=config, world=rank_info({}), step_from="auto") as session:
        num_steps = loop()
    assert session.recorded is not None
    assert (session.recorded["steps"], session.recorded["steps_from"]) == (num_steps, LOOPS[loop])


def test_what_is_known_of_optimizers_is_bounded() -> None:
    known, parameter = Optimizers(), nn.Parameter(torch.zeros(1))
    for size in range(1, 3 * MAX_FREE):
        known.key_of(SGD([parameter, *(nn.Parameter(torch.zeros(size)) for _ in range(2))]))
        gc.collect(0)
    assert known.num_known <= 2 * MAX_FREE


def test_an_optimizer_whose_parameters_cannot_be_read_is_one_by_itself() -> None:
    class Odd:
        @property
        def param_groups(self) -> Any:
            raise RuntimeError("not here")

    known, first, second = Optimizers(), Odd(), Odd()
    assert known.key_of(first) == known.key_of(first) != known.key_of(second)
