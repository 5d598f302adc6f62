"""The program that test_world.py and test_clock.py start under mpiexec: one case per name."""

from __future__ import annotations

import json
import os
import sys
import time

from hpcpace.core.environment import host_identity, process_environ, rank_info
from hpcpace.core.errors import ClockSyncError, MeshError
from hpcpace.world.clock import ClockSync
from hpcpace.world.messages import GlooMessages, MpiMessages
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world
from hpcpace.world.process_group import choose_device, init_process_group


def say(**values):
    os.write(1, (json.dumps(values) + "\n").encode())


def places(info, comm):
    place, host_keys = locate_ranks(info, comm, host_identity())
    say(rank=place.rank, local_rank=place.local_rank, local_size=place.local_size, node=place.node, keys=len(host_keys))


def all_reduce(info, comm):
    import torch
    import torch.distributed as dist

    with init_process_group(info, comm, device=choose_device("cpu", info.local_rank), timeout_s=600):
        value = torch.tensor([float(info.rank + 1)])
        dist.all_reduce(value)
        environ = process_environ()
        say(sum=value.item(), backend=dist.get_backend(), interface=environ.get("GLOO_SOCKET_IFNAME"))
    assert not dist.is_initialized()


def usage_error_everywhere(info, comm):
    raise MeshError("mesh dp=3 does not fit 2 ranks")


def usage_error_on_one(info, comm):
    if info.rank == info.world_size - 1:
        raise MeshError("no such file here")
    if comm is not None:
        comm.Barrier()


def crash_on_one(info, comm):
    if info.rank == info.world_size - 1:
        raise RuntimeError("the disk is on fire")
    comm.Barrier()


def exit_on_one(info, comm):
    if info.rank == info.world_size - 1:
        sys.exit(7)
    comm.Barrier()


def exit_everywhere(info, comm):
    sys.exit(3)


def finish(info, comm):
    pass


def clock_samples(info, comm):
    pretended = [f"host{rank}" for rank in range(info.world_size)]
    with_clock(info, MpiMessages(comm, 30) if comm else None, pretended)


def clock_on_one_host(info, comm):
    with_clock(info, MpiMessages(comm, 30) if comm else None, ["host"] * info.world_size)


def clock_over_gloo(info, comm):
    with init_process_group(info, comm, device=choose_device("cpu", info.local_rank), timeout_s=600):
        with_clock(info, GlooMessages("clock", 30), [f"host{rank}" for rank in range(info.world_size)])


def with_clock(info, messages, host_keys):
    sync = ClockSync(messages, info.rank, host_keys, timeout_s=30)
    for _ in range(50):
        sample = sync.sync()
        say(rank=info.rank, sample=sample)
    sync.close()


def stalled_rank(info, comm):
    stall(info, MpiMessages(comm, 30))


def stalled_rank_over_gloo(info, comm):
    with init_process_group(info, comm, device=choose_device("cpu", info.local_rank), timeout_s=600):
        stall(info, GlooMessages("clock", 30))


def stall(info, messages):
    sync = ClockSync(messages, info.rank, [f"host{r}" for r in range(info.world_size)], timeout_s=1)
    sync.sync()
    if info.rank == info.world_size - 1:
        time.sleep(3)
        say(rank=info.rank, late=True)
        return
    start_s = time.monotonic()
    try:
        sync.sync()
    except ClockSyncError as error:
        say(rank=info.rank, error=str(error), waited_s=time.monotonic() - start_s, broken=sync.broken)


if __name__ == "__main__":
    info = rank_info(process_environ())
    with abort_guard(None, info, errors_alike=True):
        comm = mpi_world(info)
    with abort_guard(comm, info):
        globals()[sys.argv[1]](info, comm)
