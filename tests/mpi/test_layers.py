"""Both layers over torch's operators, the one in Python and the compiled one, leave the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from buffers_program import AWAITED_BYTES, BUFFERS_BYTES, LATE_S, NUM_STEPS

from hpcpace.core.rundir import open_run
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ExitKind, Op

PROGRAM = Path(__file__).with_name("layer_program.py")
BUFFERS = Path(__file__).with_name("buffers_program.py")
# (step, group, seq, op, bytes, peer): the world is group 0 and its copy group 1.
COLLECTIVES = [
    (0, 0, 0, Op.ALL_REDUCE, 16, -1),
    (0, 1, 0, Op.ALL_REDUCE, 16, -1),
    (0, 0, 1, Op.BROADCAST, 16, 1),
    (0, 0, 2, Op.ALL_GATHER, 32, -1),
    (0, 0, 3, Op.REDUCE, 16, 1),
    (0, 0, 4, Op.GATHER, 32, 0),
    (0, 0, 5, Op.SCATTER, 32, 1),
    (0, 0, 6, Op.BARRIER, 0, -1),
    (0, 0, 7, Op.ALL_REDUCE, 16, -1),
    (0, 0, 8, Op.REDUCE_SCATTER, 32, -1),
    (0, 0, 9, Op.ALL_REDUCE, 8, -1),
    (0, 0, 10, Op.ALL_REDUCE, 12, -1),
    (0, 0, 11, Op.ALL_REDUCE, 12, -1),
    (2, 0, 12, Op.ALL_REDUCE, 64, -1),
]
# It takes no number: the next operation would be 13 as well.
REFUSED = (3, 0, 13, Op.ALL_GATHER, 12, -1)
MESSAGES = [
    [*((1, 0, seq, Op.SEND, 32, 1) for seq in range(4)), (1, 0, 0, Op.RECV, 32, 1)],
    # The second one came from anybody: rank 0 turned out to be the sender when it was over.
    [*((1, 0, seq, Op.RECV, 32, 0) for seq in range(4)), (1, 0, 0, Op.SEND, 32, 0)],
]


@pytest.mark.parametrize("is_compiled", [False] if find_layer() is None else [False, True])
def test_every_call_leaves_its_row(
    mpiexec: Callable[..., CompletedProcess[str]], tmp_path: Path, is_compiled: bool
) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", HPCPACE_TRACE_COMPILED=str(is_compiled).lower())
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    assert len(set(result.stdout.split())) == 1
    (attempt,) = open_run(tmp_path / "run").attempts()
    for rank, path in attempt.trace_files().items():
        rows = read_trace(path).tables["collectives"]
        found = list(
            zip(*(rows[name].tolist() for name in ("step", "group", "seq", "op", "bytes", "peer")), strict=True)
        )
        assert sorted(found) == sorted([*COLLECTIVES, *MESSAGES[rank], REFUSED])
        failed = rows["exit_kind"] == ExitKind.FAILED
        assert [row for row, is_failed in zip(found, failed.tolist(), strict=True) if is_failed] == [REFUSED]
        # Gloo completes a send in its wait, and nobody waited for the third one.
        is_never = rows["exit_kind"] == ExitKind.NEVER
        assert list(zip(rows["op"][is_never], rows["seq"][is_never], strict=True)) == [(Op.SEND, 2)] * (rank == 0)
        rows = rows.select(~is_never & ~failed)
        assert (rows["exit_ns"] > rows["enter_ns"]).all()
        assert (rows["blocked_ns"] <= rows["exit_ns"] - rows["enter_ns"] + 1024).all()
        blocking = np.isin(rows["op"], [Op.BROADCAST, Op.ALL_GATHER, Op.REDUCE, Op.GATHER, Op.SCATTER, Op.BARRIER])
        assert set(rows["exit_kind"][blocking]) == {ExitKind.WAIT}


@pytest.mark.parametrize("is_compiled", [False] if find_layer() is None else [False, True])
def test_ranks_are_blocked_while_ddp_gives_them_the_buffers_of_a_model(
    mpiexec: Callable[..., CompletedProcess[str]], tmp_path: Path, is_compiled: bool
) -> None:
    result = mpiexec(2, BUFFERS, tmp_path / "run", HPCPACE_TRACE_COMPILED=str(is_compiled).lower())
    assert result.returncode == 0, result.stderr
    (attempt,) = open_run(tmp_path / "run").attempts()
    for rank, path in attempt.trace_files().items():
        table = rows = read_trace(path).tables["collectives"]
        # DDP also broadcasts the order of its buckets, once.
        rows = rows.select((rows["op"] == Op.BROADCAST) & np.isin(rows["bytes"], BUFFERS_BYTES))
        assert rows["step"].tolist() == sorted([*range(NUM_STEPS)] * len(BUFFERS_BYTES))
        assert (abs(rows["exit_ns"] - rows["enter_ns"] - rows["blocked_ns"]) <= 1024).all()
        rows = table.select(table["bytes"] == AWAITED_BYTES)
        assert len(rows) == NUM_STEPS
        assert rank == 1 or (rows["blocked_ns"] > 1e9 * LATE_S / 2).all()
