"""The training loop: a model on its mesh, text in, losses and a trace out."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcpace.config import Config
from hpcpace.errors import ConfigError, DataError
from hpcpace.observe.session import Session, session
from hpcpace.rundir import write_json
from hpcpace.train.data import NUM_BYTE_TOKENS, ByteText
from hpcpace.train.inject import Injector
from hpcpace.train.losses import LossLog
from hpcpace.train.parallel import Replica, build_replica
from hpcpace.train.plan import TrainPlan
from hpcpace.train.progress import progress_view
from hpcpace.units import NS_PER_S
from hpcpace.world.environment import RankInfo
from hpcpace.world.process_group import choose_device, init_process_group

RESULT_SCHEMA = "hpcpace-result/1"


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One rank's view of a training job.

    Attributes:
        plan: what to train.
        config: all settings; those of training are in the plan.
        info: this rank's place; its local_rank must be known.
        comm: an mpi4py communicator of all ranks, or None.
        text: what to train on.
        run_dir: the run directory; chosen from job or time when None.
        progress: one of `hpcpace.train.progress.STYLES`; only rank 0 shows any.
    """

    plan: TrainPlan
    config: Config
    info: RankInfo
    comm: Any
    text: ByteText
    run_dir: Path | None
    progress: str


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        losses: mean loss over the global batch, one a step; the same on every rank.
        tokens_per_s: tokens of all ranks per second of the steps after the warm-up, seen from this rank.
        run: the run directory; None where none could be made.
    """

    losses: list[float]
    tokens_per_s: float
    run: Path | None


def train(job: TrainJob) -> TrainResult:
    """Train as planned.

    Collective: every rank of the job calls this. When it returns, the traces of all ranks are closed.

    Raises:
        DataError: ranks read different texts.
        ConfigError: a fault names a host that is not in the job.
        WorldError: a GPU is asked for and there is none, or the ranks cannot reach each other.
    """
    settings = job.config.world
    device = choose_device(settings.device, job.info.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with init_process_group(
        job.info,
        job.comm,
        backend=settings.backend,
        device=device,
        interface=settings.interface,
        timeout_s=settings.timeout_s,
    ):
        _check_same_everywhere(job)
        result = _train(job, device)
        dist.barrier()
    return result


def build_optimizer(model: nn.Module, *, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW with the settings of GPT-3 (Brown et al. 2020, appendix B), without decay of biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # Fused is the fastest on CPUs, too: 1.0 ms a step against 2.2 ms of foreach with preset tiny and 1 thread.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def _check_same_everywhere(job: TrainJob) -> None:
    seen: list[Any] = [None] * job.info.world_size
    dist.all_gather_object(seen, (job.text.digest(), job.info.host))
    other = next((rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} on {seen[other][1]} reads another text than rank 0 on {seen[0][1]}: "
            "name one file that all hosts have with --data"
        )
    hosts = sorted({host for _, host in seen})
    for fault in job.plan.faults:
        if fault.host is not None and not any(fault.concerns(-1, host) for host in hosts):
            raise ConfigError(f"fault on host {fault.host!r}: the job runs on {', '.join(hosts)}")


def _train(job: TrainJob, device: torch.device) -> TrainResult:
    plan, settings, place = job.plan, job.plan.settings, job.plan.mesh.coordinates(job.info.rank)
    replica = build_replica(
        plan.shape,
        mesh=plan.mesh,
        rank=job.info.rank,
        device=device,
        dtype=getattr(torch, settings.dtype),
        seed=settings.seed,
        num_microbatches=settings.microbatches,
        sequences_per_replica=plan.sequences_per_replica,
        seq_len=plan.seq_len,
    )
    knows_loss = place.pp == plan.mesh.pp - 1 and place.tp == 0
    log = LossLog(weight=knows_loss / plan.mesh.dp, device=device)
    with session(
        name=f"gpt2-{settings.preset}",
        config=job.config,
        world=job.info,
        comm=job.comm,
        mesh=plan.mesh.as_dict(),
        coords=place.as_dict(),
        samples_unit="tokens",
        warmup_steps=settings.warmup_steps,
        run_dir=job.run_dir,
        record=_facts(plan, job.text),
    ) as observed:
        observed.watch(replica.watched)
        tokens_per_s = _steps(job, replica, observed, log, device)
    run = None if observed.run is None else observed.run.path
    result = TrainResult(losses=log.losses, tokens_per_s=tokens_per_s, run=run)
    if job.info.rank == 0 and observed.attempt is not None:
        _write_result(observed.attempt.result_json, result)
    return result


def _steps(job: TrainJob, replica: Replica, observed: Session, log: LossLog, device: torch.device) -> float:
    """Run all steps; return the tokens per second of those after the warm-up."""
    plan, settings, place = job.plan, job.plan.settings, job.plan.mesh.coordinates(job.info.rank)
    rows, samples = plan.rows(place), plan.credited_tokens(place)
    injector = Injector(
        plan.faults,
        seed=settings.seed,
        rank=job.info.rank,
        host=job.info.host,
        **_work_of_device(device),
    )
    injector.attach(replica.pieces())
    optimizer = build_optimizer(replica.model, learning_rate=settings.learning_rate)
    begin_ns, tokens_per_s = time.monotonic_ns(), 0.0
    progress = job.progress if job.info.rank == 0 else "off"
    with progress_view(progress, num_steps=settings.steps) as view:
        for step in range(settings.steps):
            if step == settings.warmup_steps:
                begin_ns = time.monotonic_ns()
            injector.begin_step(step)
            with observed.phase("data"), injector.slowed("data"):
                batch = job.text.batch(
                    step, seed=settings.seed, batch_size=settings.batch_size, seq_len=plan.seq_len, rows=rows
                )
                tokens = torch.from_numpy(batch).to(device)
            log.add(replica.forward_backward(tokens[:, :-1], tokens[:, 1:]))
            if replica.tied_group is not None:
                with observed.phase("grad_sync"):
                    replica.sync_tied_gradients()
            optimizer.step()
            optimizer.zero_grad()
            observed.step(samples=samples)
            num_timed = step + 1 - settings.warmup_steps
            if num_timed > 0:
                tokens_per_s = num_timed * plan.tokens_per_step / ((time.monotonic_ns() - begin_ns) / NS_PER_S)
            # Nobody waits for the losses: they are shown a step or so later, when they have come.
            if (step + 1) % settings.log_every == 0:
                log.gather()
            view.show(step + 1, losses=log.poll(), tokens_per_s=tokens_per_s)
        view.show(settings.steps, losses=log.finish(), tokens_per_s=tokens_per_s)
    return tokens_per_s


def _facts(plan: TrainPlan, text: ByteText) -> dict[str, Any]:
    return {
        "model": plan.facts(),
        "data": {**text.facts(), "num_tokens_used": NUM_BYTE_TOKENS},
        "inject": [{"spec": s, **asdict(f)} for s, f in zip(plan.settings.inject, plan.faults, strict=True)],
    }


def _write_result(path: Path, result: TrainResult) -> None:
    content = {"schema": RESULT_SCHEMA, "losses": result.losses, "tokens_per_s": result.tokens_per_s}
    try:
        write_json(path, content)
    except OSError as error:  # a full disk is no reason for a finished training to fail
        print(f"hpcpace: cannot write {path}: {error.strerror}", file=sys.stderr)


def _work_of_device(device: torch.device) -> dict[str, Any]:
    """Return how an injector measures work on a device and adds to it; its own defaults are those of a CPU."""
    if device.type != "cuda":
        return {}

    def clock() -> int:
        torch.cuda.synchronize(device)
        return time.monotonic_ns()

    return {"clock": clock, "spend": time.sleep}
