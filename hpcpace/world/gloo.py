"""Gloo groups with all ranks of torch's default group that the job does not see: for messages apart from its own.

They bypass `torch.distributed.new_group`, which counts the groups of a process, so that all ranks must call it equally
often, and which waits for the other ranks without a timeout.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hpcpace.core.environment import process_environ


def gloo_group(name: str, timeout_s: float, store: Any = None) -> Any:
    """Return a new gloo group below torch's dispatcher, so that nothing observes it.

    Collective: every rank of torch's default group makes groups of this name equally often.

    Args:
        name: of the group; it may be used again.
        timeout_s: limit on making the group, and on its operations by default.
        store: as `own_store` returns it, if the caller has a connection of our own. For each connection torch's server
            looks up a name, one after another: with a slow DNS that takes seconds.

    Raises:
        RuntimeError: a rank did not answer in time.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroupGloo

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store, _ = own_store(timeout_s)
    else:
        store.set_timeout(timeout)
    number = store.add(f"{name}/made/{rank}", 1)
    return ProcessGroupGloo(dist.PrefixStore(f"{name}/{number}", store), rank, num_ranks, timeout=timeout)


def own_store(timeout_s: float) -> tuple[Any, bool]:
    """Return the store of torch's default group with a prefix of ours, and whether the connection is ours as well.

    If two threads share a connection, one waits for the other, and the timeout belongs to the connection.

    Raises:
        RuntimeError: the store does not answer.
    """
    import torch.distributed as dist

    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=timeout_s)
    if hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(timeout)
        return dist.PrefixStore("hpcpace", store), True
    # torch before 2.13 cannot copy a store.
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return dist.PrefixStore("hpcpace", store), False
    own = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=timeout)
    # The agent of torchrun keeps its store over restarts of the ranks.
    return dist.PrefixStore(f"hpcpace/{process_environ().get('TORCHELASTIC_RESTART_COUNT', '')}", own), True
