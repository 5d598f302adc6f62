"""Several ranks on one GPU over gloo, one of them with more work: the report names it. `make gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: needs a GPU"),
]
PROGRAM = Path(__file__).with_name("shared_gpu_program.py")
NUM_RANKS, SLOW_RANK = 3, 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "run"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return path


def test_operations_over_gloo_are_the_work_of_the_host(run: Path) -> None:
    for rank in range(NUM_RANKS):
        rows = read_trace(run / "attempt-0" / "trace" / f"rank-{rank:05d}.h5").tables["collectives"]
        assert len(rows) > 0 and (rows["enqueue_ns"] == rows["enter_ns"]).all()


def test_the_rank_with_more_kernels_has_the_longer_forward_pass_on_the_device(run: Path) -> None:
    medians_ns = []
    for rank in range(NUM_RANKS):
        rows = read_trace(run / "attempt-0" / "trace" / f"rank-{rank:05d}.h5").tables["phases"]
        rows = rows.select((rows["phase"] == Phase.FORWARD) & (rows["step"] > 5))
        assert (rows["device_end_ns"] > 0).all()
        medians_ns.append(np.median(rows["device_end_ns"] - rows["device_begin_ns"]))
    assert int(np.argmax(medians_ns)) == SLOW_RANK


def test_the_report_names_the_rank_with_more_work(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcpace", "report", "--json", str(run)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert f"rank {SLOW_RANK}" in json.dumps(verdict)
