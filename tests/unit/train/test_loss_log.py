from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from hpcpace.train.parallel import LossLog  # noqa: E402


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_losses_keep_the_order_of_the_steps():
    log = LossLog(weight=1.0, device=torch.device("cpu"))
    for step in range(7):
        log.add(torch.tensor(float(step)))
        if step % 3 == 2:
            log.gather()
    assert log.finish() == list(range(7))


@pytest.mark.usefixtures("world_of_one")
def test_losses_are_unknown_until_they_are_gathered():
    log = LossLog(weight=1.0, device=torch.device("cpu"))
    log.add(torch.tensor(3.0))
    assert log.poll() == []


@pytest.mark.usefixtures("world_of_one")
def test_a_rank_without_a_say_adds_nothing():
    log = LossLog(weight=0.0, device=torch.device("cpu"))
    log.add(None)
    log.add(torch.tensor(3.0))
    assert log.finish() == [0.0, 0.0]
