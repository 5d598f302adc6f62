"""Host time that observation adds to a collective: a blocking all-reduce in a world of one over gloo, with and without.

The recorder is real and flushes to disk. Run it with `python -m experiments.bench.collective`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.bench.pairs import alternate
from hpcpace.observe.collectives import CollectiveObserver
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

_HEADER = TraceHeader(run_id="bench", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(1024)
    for name, is_async in (("blocking", False), ("asynchronous, waited for", True)):
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Path(folder) / "rank-00000.h5", _HEADER, warn=print)
            recorder.start()

            def call_us(is_async: bool = is_async) -> float:
                begin_ns = time.perf_counter_ns()
                for _ in range(args.calls):
                    work = dist.all_reduce(value, async_op=is_async)
                    if work is not None:
                        work.wait()
                return (time.perf_counter_ns() - begin_ns) / args.calls / 1e3

            def observed_us(recorder: Recorder = recorder) -> float:
                observer = CollectiveObserver(recorder, warn=print, device_times=None)
                observer.install()
                duration_us = call_us()
                observer.uninstall()
                return duration_us

            pairs = alternate(observed_us, call_us, num_pairs=args.pairs, num_warmups=2)
            recorder.close()
        median, low, high = pairs.difference()
        ratio, *_ = pairs.ratio()
        print(
            f"observation of one all_reduce of 4 KiB, {name}: +{median:.1f} us [{low:.1f}, {high:.1f}], "
            f"{ratio:.2f} times the call without ({args.pairs} pairs of {args.calls} calls)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
