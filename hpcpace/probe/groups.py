"""Groups of ranks that measure together, below torch's dispatcher: nothing observes them, no group of a job changes.

Only members call; `torch.distributed.new_group` would need every rank of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hpcpace.probe.world import ProbeWorld


class ProbeGroup:
    """Some ranks of a probe and a backend of torch that connects them.

    Collective: all `ranks` make it with the same arguments.

    Args:
        world: the ranks of the probe.
        name: of the group; each is used once.
        ranks: its members, ascending, with this one.

    Raises:
        RuntimeError: a member did not come within the world's timeout.
    """

    def __init__(self, world: ProbeWorld, name: str, ranks: Sequence[int]) -> None:
        import torch.distributed as dist

        self.ranks = tuple(ranks)
        self.own = self.ranks.index(world.rank)
        self.device = world.device
        store = dist.PrefixStore(f"group/{name}", world.board.store)
        self.backend = _backend(world.backend, store, self.own, len(self.ranks), world.timeout_s)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def close(self) -> None:
        """End the group, also where members have failed."""
        if self.device.type == "cuda":
            self.backend.abort()  # a shutdown would wait for operations that may never end

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all members, the same on all of them.

        Collective: every member calls this with as many values.

        Raises:
            RuntimeError: a member did not take part within the timeout.
        """
        from torch.distributed import ReduceOp

        return self._reduced(values, ReduceOp.MAX)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all members.

        Collective: every member calls this with as many values.

        Raises:
            RuntimeError: a member did not take part within the timeout.
        """
        from torch.distributed import ReduceOp

        return self._reduced(values, ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        import torch
        from torch._C._distributed_c10d import AllreduceOptions

        options = AllreduceOptions()
        options.reduceOp = op
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        self.backend.allreduce([tensor], options).wait()
        reduced: list[float] = tensor.tolist()
        return reduced


def _backend(name: str, store: Any, rank: int, num_ranks: int, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if name == "gloo":
        from torch._C._distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, num_ranks, timeout=timeout)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # torch without CUDA has none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, num_ranks, options)
