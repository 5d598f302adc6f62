"""Measures what packing the traces of many ranks costs and gives: `python -m experiments.bench.pack`.

A run of 4,096 ranks is written as `report_speed` does, a copy of it is packed, and both are read in turns with a warm
page cache, each time in a process of its own: all tables that a report reads but the collectives; then the collectives
of all ranks, by ranges of steps, rank by rank and, from packs, all ranks at once.

Options:
  --ranks N  [4096]
  --steps N  [250]
  --repeats N  [3]
  --folder PATH   keep the runs in this folder and reuse those in it
  --measure PATH
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments.bench.pairs import measured_apart, medians, taken
from experiments.options import command_line
from hpcpace.core.files import Folder
from hpcpace.core.pool import map_processes
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.pack_index import collectives_of
from hpcpace.trace.pack_reader import open_pack
from hpcpace.trace.packing import PackPlan, pack_attempt
from hpcpace.trace.stream import ChunkCache, StoredTable, TraceStream

_BLOCKS_AT_ONCE = 4


def main() -> None:
    args = command_line(__doc__)
    if args.measure:
        print(json.dumps(measure(RunDirectory(args.measure).attempt(0))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        own, packed = (folder / f"{args.ranks}x{args.steps}{end}" for end in ("", "-packed"))
        if not own.exists():
            # Not in the processes that measure: those that they fork would copy more memory than a command's.
            from experiments.bench.report_speed import FEW, write_run

            write_run(RunDirectory(own), args.ranks, args.steps, FEW)
        shutil.rmtree(packed, ignore_errors=True)
        shutil.copytree(own, packed)
        _print_packing(RunDirectory(packed).attempt(0))
        samples: dict[Path, list[dict[str, float]]] = {own: [], packed: []}
        for _ in range(args.repeats + 1):  # the first turn warms the page cache
            for run, found in samples.items():
                found.append(measured_apart("experiments.bench.pack", "--measure", run))
        for run, found in samples.items():
            print(f"{run.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in medians(found[1:]).items()))


def _print_packing(attempt: Attempt) -> None:
    with taken() as packing:
        result = pack_attempt(attempt, PackPlan(), begin_stage=lambda name: lambda done, total: None)
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"packed {result.num_ranks} ranks: {result.files_before} to {result.files_after} files, "
        f"{result.bytes_before / 1e6:.1f} to {result.bytes_after / 1e6:.1f} MB in {packing.wall_s:.1f} s "
        f"({packing.cpu_s:.1f} s of CPU, at most {peak_kib / 2**20:.2f} GiB in a process)"
    )


def measure(attempt: Attempt) -> dict[str, float]:
    """Return seconds to read all but the collectives, and millions of collectives a second, each also of CPU time."""
    with taken() as reading:
        found = read_attempt(attempt, most_rows=0, tables=TABLES_USED)
    measured = {"read_s": reading.wall_s, "read_cpu_s": reading.cpu_s}
    streams = [table.stream for trace in found.traces if isinstance(table := trace.tables["collectives"], StoredTable)]
    num_blocks = max((stream.num_blocks for stream in streams), default=0)
    ranges = [(first, first + _BLOCKS_AT_ONCE) for first in range(0, num_blocks, _BLOCKS_AT_ONCE)]
    measured |= _speed("rank_by_rank", partial(_rows_by_rank, streams), ranges)
    if attempt.packs():
        measured |= _speed("all_ranks", partial(_rows_of_pack, attempt), [path.name for path in attempt.packs()])
    return measured


def _speed(name: str, count: Callable[..., int], tasks: list) -> dict[str, float]:
    with taken() as counting:
        million = sum(map_processes(count, tasks)) / 1e6
    return {f"{name}_million_per_s": million / counting.wall_s, f"{name}_million_per_cpu_s": million / counting.cpu_s}


def _rows_by_rank(streams: list[TraceStream], blocks: tuple[int, int]) -> int:
    first, stop = blocks
    return sum(
        len(stream.blocks(first, min(stop, stream.num_blocks))) for stream in streams if first < stream.num_blocks
    )


def _rows_of_pack(attempt: Attempt, name: str) -> int:
    with Folder.open(attempt.trace_dir) as folder:
        descriptor, pack = open_pack(name, folder)
    collectives = collectives_of(pack, descriptor, partial(os.dup, descriptor), ChunkCache())
    num_rows = 0
    for first in range(0, collectives.num_blocks, _BLOCKS_AT_ONCE):
        rows, _ = collectives.read_blocks(first, min(first + _BLOCKS_AT_ONCE, collectives.num_blocks))
        num_rows += len(rows)
    os.close(descriptor)
    return num_rows


if __name__ == "__main__":
    main()
