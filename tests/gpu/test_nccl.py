"""What a CPU cannot show: NCCL through the dispatcher, device times from CUDA events. `make gpu`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpcpace
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.schema import ExitKind, Op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: needs a GPU"),
]
NUM_STEPS = 20


def _trace(tmp_path: Path) -> tuple[RankTrace, int, int]:
    value = torch.ones(1 << 24, device="cuda")
    begin_ns = time.monotonic_ns()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        for _ in range(NUM_STEPS):
            torch.cuda._sleep(10_000_000)
            dist.all_reduce(value)
            session.step()
        torch.cuda.synchronize()
        assert session.attempt is not None
        path = session.attempt.trace_file(0)
    return read_trace(path), begin_ns, time.monotonic_ns()


@pytest.mark.usefixtures("nccl")
def test_every_operation_has_its_start_and_end_on_the_device(tmp_path: Path) -> None:
    trace, begin_ns, end_ns = _trace(tmp_path)
    rows = trace.tables["collectives"]
    assert rows["op"].tolist() == [Op.ALL_REDUCE] * NUM_STEPS
    assert set(rows["exit_kind"]) == {ExitKind.COMPLETION}
    assert (rows["enter_ns"] <= rows["exit_ns"]).all()
    assert (rows["enter_ns"] >= begin_ns).all() and (rows["exit_ns"] <= end_ns).all()
    # The host runs ahead of the device, which sleeps before each operation.
    assert (rows["enqueue_ns"][1:] < rows["enter_ns"][1:]).all()


@pytest.mark.usefixtures("nccl")
def test_gpu_counters_are_read(tmp_path: Path) -> None:
    trace, _, _ = _trace(tmp_path)
    assert (trace.tables["host"]["gpu_memory_bytes"] > 0).all()
