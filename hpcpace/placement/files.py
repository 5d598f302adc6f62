"""Placements as launchers take them: one line for each rank.

- `slurm`: the host of each rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`.
- `openmpi`: the same as a hostfile for `mpirun --map-by seq`. A rankfile would have to name cores, and so undo the
  binding that the job asks for.
- `torchrun`: torchrun numbers ranks by host, so that its line i is the started rank that does the work of rank i.
  `init_device_mesh` has no order of ranks; DeviceMesh("cuda", torch.tensor(order).reshape(dp, pp)) takes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.text import shell_word
from hpcpace.metrics import Ints


def placement_text(kind: str, host: Ints, names: Sequence[str]) -> str:
    """Return the content of a file.

    Args:
        kind: `slurm`, `openmpi` or `torchrun`.
        host: of each rank, index into `names`, int64, (num_ranks,).
        names: of the hosts, in the order in which torchrun numbers them.
    """
    if kind == "torchrun":
        return "".join(f"{rank}\n" for rank in started_ranks(host).tolist())
    return "".join(f"{names[at]}\n" for at in host.tolist())


def started_ranks(host: Ints) -> Ints:
    """Return which rank of those numbered host by host does the work of each rank, int64, (num_ranks,)."""
    return np.argsort(np.argsort(host, kind="stable")).astype(np.int64)


def local_ranks(host: Ints) -> Ints:
    """Return the number of each rank on its host, int64, (num_ranks,), ascending by rank."""
    order = np.argsort(host, kind="stable")
    first = np.searchsorted(host[order], host[order])
    local = np.empty(len(host), np.int64)
    local[order] = np.arange(len(host)) - first
    return local


def usage_line(kind: str, file: str) -> str:
    """Return how a job takes a file, safe to paste."""
    name = shell_word(file)
    return {
        "slurm": f"SLURM_HOSTFILE={name} srun --distribution=arbitrary ...",
        "openmpi": f"mpirun --hostfile {name} --map-by seq ...",
        "torchrun": f"DeviceMesh with the ranks of {name}, reshaped to the mesh",
    }[kind]
