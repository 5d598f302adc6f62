"""Device times of phases, waits and graphs on a real GPU. `make gpu`. Written without one, and not run on one yet."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpcpace
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.schema import EventKind, ExitKind, Phase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: needs a GPU"),
]
WIDTH, NUM_LAYERS, NUM_STEPS, NUM_WARMUPS = 4096, 8, 20, 5


def _model(width: int = WIDTH, num_layers: int = NUM_LAYERS) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).cuda()


def _train(session: hpcpace.Session, model: nn.Module, *, num_steps: int = NUM_STEPS, rows: int = 4096) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(rows, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for _ in range(num_steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        session.step()
    return [loss.item().hex() for loss in losses]


def _read(session: hpcpace.Session) -> RankTrace:
    assert session.attempt is not None
    trace = read_trace(session.attempt.trace_file(0))
    assert trace.problems == ()
    return trace


def _marked(trace: RankTrace, name: str = "phases"):
    rows = trace.tables[name]
    return rows.select(rows["step"] >= NUM_WARMUPS) if name == "steps" else rows.select(
        (rows["step"] >= NUM_WARMUPS) & ~np.isin(rows["phase"], [Phase.GC, Phase.PACE])
    )  # fmt: skip


@pytest.mark.usefixtures("nccl")
def test_every_mark_has_a_time_on_the_device_after_that_of_the_host(tmp_path: Path) -> None:
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        _train(session, _model())
    trace = _read(session)
    for name in ("steps", "phases"):
        rows = _marked(trace, name)
        assert len(rows) > 0
        for edge in ("begin_ns", "end_ns"):
            assert (rows[f"device_{edge}"] > 0).all()
            assert (rows[f"device_{edge}"] - rows[edge] > -50_000).all()
    # The host runs ahead of a device that multiplies matrices.
    forward = _marked(trace).select(_marked(trace)["phase"] == Phase.FORWARD)
    assert np.median(forward["device_begin_ns"] - forward["begin_ns"]) > 1_000_000


@pytest.mark.usefixtures("nccl")
def test_device_phases_agree_with_the_kernels_that_the_profiler_saw(tmp_path: Path) -> None:
    model = _model()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        _train(session, model, num_steps=NUM_WARMUPS)
        torch.cuda.synchronize()
        # Unless events accumulate, torch 2.11 warns that they do not.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            _train(session, model)
            torch.cuda.synchronize()
    rows = _marked(_read(session))
    rows = rows.select(np.isin(rows["phase"], [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]))
    phases_s = (rows["device_end_ns"] - rows["device_begin_ns"]).sum() / 1e9
    kernels_s = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    # The loss and the zeroing of gradients are in no phase, and they are small.
    assert phases_s == pytest.approx(kernels_s, rel=0.02)


@pytest.mark.usefixtures("nccl")
def test_a_stream_is_held_by_an_operation_behind_other_work(tmp_path: Path) -> None:
    value = torch.ones(1 << 26, device="cuda")
    side = torch.cuda.Stream()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        for _ in range(NUM_STEPS):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                work = dist.all_reduce(value, async_op=True)
            work.wait()
            session.step()
    rows = _read(session).tables["collectives"]
    assert set(rows["exit_kind"]) == {ExitKind.COMPLETION} and len(rows) == NUM_STEPS
    # About 10 ms of sleep hold the stream that waits, and less than twice of that.
    assert 2_000_000 < np.median(rows["blocked_ns"]) < 100_000_000


@pytest.mark.usefixtures("nccl")
def test_operations_that_are_coalesced_are_recorded(tmp_path: Path) -> None:
    values = [torch.ones(1 << 20, device="cuda") for _ in range(3)]
    received = torch.zeros(1 << 20, device="cuda")
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        for _ in range(NUM_STEPS):
            with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
                for value in values:
                    dist.all_reduce(value)
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, values[0], 0), dist.P2POp(dist.irecv, received, 0)])
            for work in works:
                work.wait()
            session.step()
    rows = _read(session).tables["collectives"]
    assert (rows["step"] == NUM_STEPS - 1).sum() >= 3
    assert ExitKind.NEVER not in rows["exit_kind"]
    assert (rows["exit_ns"] >= rows["enter_ns"]).all()


@pytest.mark.usefixtures("nccl")
def test_functional_collectives_and_their_waits_are_recorded(tmp_path: Path) -> None:
    import torch.distributed._functional_collectives as functional

    value = torch.ones(1 << 20, device="cuda")
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        for _ in range(NUM_STEPS):
            functional.wait_tensor(functional.all_reduce(value, "sum", dist.group.WORLD))
            session.step()
    rows = _read(session).tables["collectives"]
    assert len(rows) == NUM_STEPS and set(rows["exit_kind"]) == {ExitKind.COMPLETION}


@pytest.mark.usefixtures("nccl")
def test_fully_sharded_models_train_alike_and_all_their_operations_end(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        model = _model(num_layers=4)
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    class Nobody:
        def step(self) -> None:
            pass

    plain = _train(Nobody(), sharded())  # type: ignore[arg-type]
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        observed = _train(session, sharded())
    assert observed == plain
    rows = _read(session).tables["collectives"]
    assert ExitKind.NEVER not in rows["exit_kind"]


@pytest.mark.usefixtures("nccl")
def test_capturing_a_graph_with_a_collective_is_not_broken_and_counted(tmp_path: Path) -> None:
    value, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        dist.all_reduce(value)  # NCCL connects outside of the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(value)
            with session.phase("forward"):
                value.mul_(2.0)
        value.fill_(1.0)
        for _ in range(NUM_STEPS):
            graph.replay()
            session.step()
        torch.cuda.synchronize()
    assert value[0].item() == 2.0**NUM_STEPS
    trace = _read(session)
    sources = trace.tables["events"].select(trace.tables["events"]["kind"] == EventKind.DEVICE_SOURCE)
    assert sources["code"].tolist() == [1]
    assert len(trace.tables["collectives"]) == 1


@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # inductor's, on each GPU that could use it
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_train_alike(tmp_path: Path, mode: str) -> None:
    class Nobody:
        def step(self) -> None:
            pass

    plain = _train(Nobody(), torch.compile(_model(num_layers=2), mode=mode), rows=256)  # type: ignore[arg-type]
    torch.compiler.reset()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        observed = _train(session, torch.compile(_model(num_layers=2), mode=mode), rows=256)
    assert observed == plain
    rows = _marked(_read(session))
    assert (rows["device_end_ns"] > 0).all()


def test_a_rank_that_computes_on_the_cpu_gets_no_context_on_the_gpu(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, torch, hpcpace\n"
        "with hpcpace.session(run_dir=sys.argv[1]) as session:\n"
        "    for _ in range(3):\n"
        "        session.step()\n"
        "print(torch.cuda.is_available(), torch._C._cuda_hasPrimaryContext(0))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.usefixtures("nccl")
def test_the_device_is_synchronised_by_the_anchors_alone(tmp_path: Path) -> None:
    """Between them the host runs ahead: it issues all steps long before the device has done them."""
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        torch.cuda._sleep(1_000)
        torch.cuda.synchronize()
        for _ in range(32):
            session.step()
        time.sleep(1.1)
        session.step()  # with an anchor; none is due in the next 4 s, and before step 64
        begin_s = time.monotonic()
        for _ in range(20):
            torch.cuda._sleep(100_000_000)
            session.step()
        issued_s = time.monotonic() - begin_s
        torch.cuda.synchronize()
        done_s = time.monotonic() - begin_s
    assert issued_s < 0.5 * done_s
