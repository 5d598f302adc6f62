"""What `hpcpace place` finds for ranks that were scattered over their hosts, beside the planted placement.

Data-parallel replicas of 8 tensor-parallel ranks or pipeline stages: with one replica on each host of 8, in order, the
placement is planted.

Options:
  --ranks N   a multiple of 64 [1024]
  --pipeline  replicas of stages, not of tensor-parallel ranks
"""

from __future__ import annotations

import time

import numpy as np

from experiments.options import command_line
from hpcpace.metrics import Floats
from hpcpace.placement.assign import PlacementThresholds, Volumes, better_host, levels_between, volumes
from hpcpace.placement.gain import edges

_PER_HOST, _HOSTS_PER_LEAF = 8, 8
_REPLICA_BYTES, _DATA_BYTES = 1000, 10


def main() -> None:
    args = command_line(__doc__)
    num_ranks, traffic = args.ranks, _traffic(args.ranks, is_pipeline=args.pipeline)
    num_hosts = num_ranks // _PER_HOST
    levels = levels_between([("spine", f"leaf{host // _HOSTS_PER_LEAF}") for host in range(num_hosts)])
    planted = np.repeat(np.arange(num_hosts), _PER_HOST)
    scattered = np.random.default_rng(1).permutation(planted)
    begin_s = time.perf_counter()
    found = better_host(traffic, scattered, levels, PlacementThresholds())
    took_s = time.perf_counter() - begin_s
    _print("scattered", volumes(traffic, scattered, levels))
    _print(f"found in {took_s:.1f} s", volumes(traffic, found, levels))
    _print("planted", volumes(traffic, planted, levels))


def _traffic(num_ranks: int, *, is_pipeline: bool) -> Floats:
    traffic = np.zeros((num_ranks, num_ranks))
    ranks = np.arange(num_ranks).reshape(-1, _PER_HOST)
    if is_pipeline:
        source, destination = ranks[:, :-1].ravel(), ranks[:, 1:].ravel()
        traffic[source, destination] = traffic[destination, source] = _REPLICA_BYTES
    for groups, size_bytes in ((ranks[: 0 if is_pipeline else None], _REPLICA_BYTES), (ranks.T, _DATA_BYTES)):
        for members in groups:
            source, destination, share = edges("all_reduce", members, -1)
            np.add.at(traffic, (source, destination), share * size_bytes)
    return traffic


def _print(name: str, found: Volumes) -> None:
    print(f"{name}: {found.uplink_bytes:,.0f} bytes over uplinks, {found.host_bytes:,.0f} between hosts")


if __name__ == "__main__":
    main()
