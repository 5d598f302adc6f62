"""Whether parameters have changed is asked of the parameter that the module has now."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcpace.observe.training_calls import ParameterProbe


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_an_update_in_place_is_a_change(model: torch.nn.Module) -> None:
    probe = ParameterProbe()
    for _ in range(3):
        probe.forward_begins(model)
        probe.backward_ended()
        assert probe.has_changed() is False
        with torch.no_grad():
            model[1].bias.add_(1.0)
        assert probe.has_changed() is True


def test_a_parameter_put_in_place_of_another_is_the_one_looked_at(model: torch.nn.Module) -> None:
    probe, old = ParameterProbe(), model[1].bias
    probe.forward_begins(model)
    model[1].bias = torch.nn.Parameter(torch.ones(1))
    probe.forward_begins(model)
    probe.backward_ended()
    with torch.no_grad():
        old.add_(1.0)
    assert probe.has_changed() is False
    with torch.no_grad():
        model[1].bias.add_(1.0)
    assert probe.has_changed() is True


def test_a_module_whose_last_parameter_is_frozen_is_looked_at_anew(model: torch.nn.Module) -> None:
    probe = ParameterProbe()
    probe.forward_begins(model)
    model[1].requires_grad_(False)
    probe.forward_begins(model)
    probe.backward_ended()
    with torch.no_grad():
        model[0].bias.add_(1.0)
    assert probe.has_changed() is True


def test_a_sharded_parameter_is_read_without_a_collective(model: torch.nn.Module) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        probe = ParameterProbe()
        sharded = distribute_module(model, init_device_mesh("cpu", (2,)), _shard)
        sharded[1].weight.data.to_local().zero_()  # nobody has sent values: any may be in this memory
        probe.forward_begins(sharded)
        with CommDebugMode() as counted:
            probe.backward_ended()
            assert probe.has_changed() is False
            sharded[1].weight.data.to_local().add_(1.0)  # without a new version of the parameter
            assert probe.has_changed() is True
    finally:
        dist.destroy_process_group()
    assert counted.get_total_counts() == 0


def _shard(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, torch.nn.Linear):
        module.register_parameter("bias", None)
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)]))


def test_a_module_without_parameters_knows_nothing() -> None:
    probe = ParameterProbe()
    probe.forward_begins(torch.nn.ReLU())
    assert probe.has_changed() is None


def test_a_large_model_is_walked_once(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ParameterProbe()
    probe.forward_begins(model)
    monkeypatch.setattr(torch.nn.Module, "modules", lambda *_: pytest.fail("walked again"))
    probe.forward_begins(model)
    probe.backward_ended()
    assert probe.has_changed() is False
