from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import each_case

from hpcpace.core.environment import rank_info
from hpcpace.core.errors import WorldError
from hpcpace.world.process_group import choose_device, init_process_group

CPU = torch.device("cpu")


def test_a_single_process_gets_a_group_that_ends_with_the_context():
    with init_process_group(rank_info({}, host="here"), None, device=CPU):
        assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    assert not dist.is_initialized()


def test_an_error_ends_the_group_too():
    with pytest.raises(ZeroDivisionError), init_process_group(rank_info({}, host="here"), None, device=CPU):
        raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "2 ranks started by slurm have no MPI communicator"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 and WORLD_SIZE=2 are set, MASTER_ADDR and MASTER_PORT not"),
    ],
)
def test_refuses_ranks_that_cannot_find_each_other(monkeypatch, environ, message):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with (
        pytest.raises(WorldError, match=message),
        init_process_group(rank_info(environ, host="here"), None, device=CPU),
    ):
        pass


@each_case(
    ("name", "local_rank", "num_gpus", "device"),
    [
        ("cpu", 0, 4, "cpu"),
        ("auto", 0, 0, "cpu"),
        ("auto", 3, 4, "cuda:3"),
        ("cuda", 3, 4, "cuda:3"),
        ("cuda", 3, 1, "cuda:0"),
    ],
)
def test_chooses_the_device_of_a_rank(monkeypatch, name, local_rank, num_gpus, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    assert choose_device(name, local_rank) == torch.device(device)


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "message"), [(0, 0, "torch sees no GPU here"), (2, 2, "local rank 2 has no GPU")]
)
def test_refuses_a_gpu_that_is_not_there(monkeypatch, local_rank, num_gpus, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    with pytest.raises(WorldError, match=message):
        choose_device("cuda", local_rank)
