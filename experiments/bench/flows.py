"""Measures what recording connections and interfaces costs: processor time of all ranks of a host, and slices of it.

Each rank is a process with connections to one other process, which sends something through each of them every second.
It does nothing but record: one rank interfaces, all of them connections, into a trace. What the recorder costs without
them is measured first, for as long, and subtracted. Slices are the processor time
between two calls that give up Python's global lock, for which a thread that trains has to wait.
`python -m experiments.bench.flows`

Options:
  --ranks N  [8]
  --sockets N  of each rank [64]
  --seconds X  [240.0]
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from experiments.bench.pairs import header
from experiments.options import command_line
from hpcpace.observe.host import connections
from hpcpace.observe.host.connections import FlowSampler, OwnConnections
from hpcpace.observe.host.network import NetworkCounters, find_network_counters
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.recorder import Recorder

_MESSAGE = bytes(1000)
_NUM_SLICE_ROUNDS = 20
_NS_PER_S = 1e9


def main() -> None:
    args = command_line(__doc__)
    context = multiprocessing.get_context("spawn")
    ranks = []
    with socket.create_server(("127.0.0.1", 0), backlog=args.ranks * args.sockets) as server:
        for rank in range(args.ranks):
            own, other = context.Pipe()
            arguments = (rank, args.sockets, args.seconds, server.getsockname(), other)
            ranks.append((context.Process(target=_run_rank, args=arguments), own))
        for process, _ in ranks:
            process.start()
        accepted = [server.accept()[0] for _ in range(args.ranks * args.sockets)]
    for _, own in ranks:
        own.send("start")
    end_s = time.monotonic() + args.seconds
    while time.monotonic() < end_s:
        for one in accepted:
            one.sendall(_MESSAGE)
        time.sleep(1.0)
    results: list[dict[str, Any]] = [own.recv() for _, own in ranks]
    for process, _ in ranks:
        process.join()
    for one in accepted:
        one.close()
    _show(results, args.sockets)


def _show(results: list[dict[str, Any]], num_sockets: int) -> None:
    share = 100 * sum(one["share"] for one in results)
    num_rows = sum(one["num_rows"] for one in results)
    size = sum(one["file_bytes"] for one in results)
    slices = [one for result in results for one in result["slices_us"]]
    idle = 100 * sum(one["idle_share"] for one in results)
    print(f"{len(results)} ranks of {num_sockets} sockets, all ranks together: {share - idle:.3f} % of a core")
    print(f"  with all that the recorder does: {share:.3f} %, without connections and interfaces: {idle:.3f} %")
    sampling = 100 * sum(one["sampling_share"] for one in results)
    print(f"  of it in the thread that samples: {sampling:.3f} %")
    print(f"rows of flows: {num_rows}; {size / max(num_rows, 1):.0f} bytes of trace and journal for each")
    print(f"slices: median {median(slices):.1f} us, longest {max(slices):.0f} us")


def _run_rank(rank: int, num_sockets: int, seconds: float, address: tuple[str, int], pipe: Connection) -> None:
    opened = [socket.create_connection(address) for _ in range(num_sockets)]
    with (
        patch.object(connections, "_is_loopback", lambda found: False),
        patch.object(connections, "interface_addresses", lambda: {b"none": "eth0"}),
        tempfile.TemporaryDirectory() as folder,
    ):
        pipe.recv()
        pipe.send({**_recorded(rank, Path(folder), seconds), "slices_us": _slices_us()})
    for one in opened:
        one.close()


def _recorded(rank: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Record once a second, and return what that cost."""
    network = find_network_counters() if rank == 0 else None
    own = header(rank, rank + 1, interfaces=network.interfaces if network else ())
    with Recorder(folder / "rank-00000.h5", own, warn=print) as recorder:
        recorder.flush()
        size_before = _size_bytes(folder)
        sample, rows = _sampler(recorder, network)
        idle_share, _ = _share_of_core(lambda: None, seconds / 2)
        share, sampling_share = _share_of_core(sample, seconds / 2)
        recorder.flush()
        size_bytes = _size_bytes(folder) - size_before
    shares = {"share": share, "idle_share": idle_share, "sampling_share": sampling_share}
    return {**shares, "num_rows": len(rows), "file_bytes": size_bytes}


def _sampler(recorder: Recorder, network: NetworkCounters | None) -> tuple[Callable[[], None], list[None]]:
    """Return what a second's sample does, and a list that grows by one for each row of a flow."""
    flows = FlowSampler(recorder, OwnConnections().read, most=TraceConfig().flows)
    rows, add_flow = list[None](), recorder.add_flow

    def counted(*row: Any) -> None:
        rows.append(None)
        add_flow(*row)

    def sample() -> None:
        flows.sample()
        if network is not None:
            now_ns = time.monotonic_ns()
            for row in network.read():
                recorder.add_network(now_ns, *row)

    recorder.add_flow = counted
    return sample, rows


def _share_of_core(sample: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Return the processor time of this process and of this thread, as shares of the time that passes."""
    begin_s, begin_ns, thread_ns = time.monotonic(), time.process_time_ns(), time.thread_time_ns()
    while time.monotonic() < begin_s + seconds:
        sample()
        time.sleep(1.0)
    passed_ns = (time.monotonic() - begin_s) * _NS_PER_S
    return (time.process_time_ns() - begin_ns) / passed_ns, (time.thread_time_ns() - thread_ns) / passed_ns


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _slices_us() -> list[float]:
    """Return the processor time between calls that give up the lock, while connections are read, us."""
    own, slices, last_ns = OwnConnections(), list[float](), 0
    real = own._getsockopt

    def called(*arguments: Any) -> int:
        nonlocal last_ns
        slices.append((time.thread_time_ns() - last_ns) / 1e3)
        result = real(*arguments)
        last_ns = time.thread_time_ns()
        return result

    list(own.read())
    with patch.object(own, "_getsockopt", called):
        for _ in range(_NUM_SLICE_ROUNDS):
            last_ns = time.thread_time_ns()
            list(own.read())
    return slices


if __name__ == "__main__":
    main()
