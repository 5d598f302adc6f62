"""The program that test_worlds_without_mpi.py starts, one process for each rank: connect, reduce, and end."""

from __future__ import annotations

import json
import os
import sys

from hpcpace.core.environment import process_environ, rank_info
from hpcpace.core.settings import load_config
from hpcpace.world.connection import connect
from hpcpace.world.mpi import abort_guard
from hpcpace.world.process_group import init_process_group
from hpcpace.world.settings import WorldConfig


def main(device: str, num_bytes: str = "4") -> None:
    environ = process_environ()
    info, settings = rank_info(environ), load_config(environ=environ).of(WorldConfig)
    with abort_guard(None, info, errors_alike=True):
        connection = connect(
            info,
            environ,
            coordination=settings.coordination,
            rendezvous=settings.rendezvous,
            timeout_s=settings.start_timeout_s,
        )
    with abort_guard(connection.comm, info):
        import torch
        import torch.distributed as dist

        with init_process_group(
            info,
            connection.comm,
            device=device,
            rendezvous=connection.rendezvous,
            start_timeout_s=settings.start_timeout_s,
        ):
            for _ in range(8):
                value = torch.ones(max(1, int(num_bytes) // 32))
                dist.all_reduce(value)
        interfaces = process_environ().get("GLOO_SOCKET_IFNAME")
        said = {"rank": info.rank, "sum": value[0].item(), "line": connection.line, "interfaces": interfaces}
        os.write(1, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
