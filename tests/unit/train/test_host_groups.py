"""Which replicas are averaged host by host; tests/mpi/test_losses.py has the groups themselves."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hpcpace.core.errors import WorldError
from hpcpace.train.data_parallel import host_groups


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("hosts", [["n1"] * 4, ["n1", "n2", "n3", "n4"]])
def test_one_host_or_one_replica_on_each_is_the_plain_average(hosts: list[str]) -> None:
    assert host_groups([(0, 1, 2, 3)], hosts) is None


def test_hosts_with_different_numbers_of_replicas_are_named() -> None:
    with pytest.raises(WorldError, match="not 3 on n1, 1 on n2: drop it, or place them"):
        host_groups([(0, 1, 2, 3)], ["n1", "n1", "n1", "n2"])
