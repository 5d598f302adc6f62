from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def nccl() -> Iterator[None]:
    """A world of one over NCCL."""
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()
