"""The floor that benchmarks compare a report with splits waiting from transfer rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.bench.floor import split
from hpcpace.trace.schema import Op, TraceHeader, row_dtypes
from hpcpace.trace.writer import TraceWriter

US = 1024  # times are kept to 256 ns
GROUP = {0: 7, 1: 3}  # what each rank calls the world


def write(folder: Path, rank: int, offset_ns: int, rows: list[tuple[int, Op, int, int]]) -> None:
    header = TraceHeader(
        run_id="r", attempt=0, rank=rank, world_size=2, local_rank=0, local_size=1, node=rank, host=f"n{rank}"
    )
    dtypes = row_dtypes()
    writer = TraceWriter(folder / f"rank-{rank:05d}.h5", header)
    done = np.zeros(len(rows), dtypes["collectives"])
    done["group"] = GROUP[rank]
    for column, values in zip(("seq", "op", "enter_ns", "exit_ns"), zip(*rows, strict=True), strict=True):
        done[column] = values
    done["enter_ns"] += offset_ns
    done["exit_ns"] += offset_ns
    writer.add("collectives", done)
    writer.add("groups", np.array([(GROUP[rank], member, b"w", b"gloo") for member in (0, 1)], dtypes["groups"]))
    clock = np.zeros(1, dtypes["clock"])
    clock["offset_ns"] = offset_ns
    writer.add("clock", clock)
    writer.close()


def test_a_rank_waits_until_the_last_one_comes_on_the_common_clock(tmp_path: Path) -> None:
    write(
        tmp_path,
        0,
        0,
        [
            (0, Op.ALL_REDUCE, 100 * US, 190 * US),
            (0, Op.SEND, 200 * US, 210 * US),
            (1, Op.BARRIER, 300 * US, 320 * US),
        ],
    )
    write(
        tmp_path,
        1,
        5_000_000 * US,
        [
            (1, Op.BARRIER, 310 * US, 320 * US),
            (0, Op.ALL_REDUCE, 150 * US, 190 * US),
            (0, Op.RECV, 200 * US, 210 * US),
        ],
    )
    found = split(tmp_path)
    assert found.num_records == 6
    assert found.wait_ns.tolist() == [60 * US, 0]
    assert found.transfer_ns.tolist() == [50 * US, 50 * US]
