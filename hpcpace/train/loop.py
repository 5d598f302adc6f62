"""The training loop: a model on its mesh, data in, losses and a trace out; and computation that takes a set time.

Slurm sends a signal before the time limit (`sbatch --signal`), to each rank at a different moment. The ranks vote
about once a second on whether to stop, and all stop after the same step, so that they can write a checkpoint. The vote
uses a separate gloo group below torch's dispatcher, so that neither GPUs nor the trace see it.

Tensors, gradients and messages are those of the model, which may be a scaled-down one, and only the time that its
computation takes is set. Each piece of the model waits for what its share of that time leaves behind the work that it
did. Ranks of a lab then compute equally fast in every layout, as GPUs do, as long as the machine has cores enough for
what is really computed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hpcpace import Session, session
from hpcpace.core.compat import host_backend
from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo, process_redaction
from hpcpace.core.errors import ConfigError, TrainingFailed
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.trace.schema import StepFlag
from hpcpace.train.checkpoint import Checkpoints, StartPoint, agree_on_start
from hpcpace.train.checkpoint_folder import TrainingHistory
from hpcpace.train.data import TrainingData
from hpcpace.train.data_parallel import OuterOptimizer, build_optimizer
from hpcpace.train.inject import Injector
from hpcpace.train.models import GPT2, ActivationMeter, TensorMemory, master_dtype, state_bytes, tensor_bytes
from hpcpace.train.parallel import Evaluator, LossLog, Replica, build_replica, to_device
from hpcpace.train.plan import TrainPlan, parallelism_facts
from hpcpace.train.result import (
    ProgressView,
    TrainResult,
    is_out_of_memory,
    memory_facts,
    out_of_memory,
    progress_view,
    write_result,
)
from hpcpace.train.settings import GPT2Shape, Mesh, ModelShape
from hpcpace.world.connection import Rendezvous
from hpcpace.world.process_group import init_process_group
from hpcpace.world.settings import WorldConfig

_VOTE_INTERVAL_NS = NS_PER_S
_MAX_STEPS_BETWEEN_VOTES = 1000
_MAX_OVERRUN = 0.05
"""Of emulated computation, before rank 0 warns."""


class EarlySignal:
    """Notes a signal whose default action would end the process.

    Attributes:
        name: the first signal received, such as SIGUSR1; empty before that.
    """

    def __init__(self) -> None:
        self.name = ""

    @contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Note this signal inside; for the main thread."""
        before = signal.signal(number, self._note)
        # Else the signal fails system calls under torch and MPI.
        signal.siginterrupt(number, False)
        try:
            yield
        finally:
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name


class StopVote:
    """Lets the ranks agree on the step after which they stop.

    Collective: every rank makes one, and asks after each step.

    Args:
        group: all ranks, of backend gloo; None in a world of one.
        clock: replaced in tests.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        # The operators of torch.distributed would be observed as part of the training.
        self._backend: Any = None if group is None else host_backend(group)
        self._num_ranks = 1 if group is None else group.size()
        self._clock = clock
        self._steps_left = 0
        self._window = 1
        self._began_ns = clock()
        self._ballot = torch.zeros(2, dtype=torch.float64)
        self._work: Any = None

    def stops(self, wants_to_stop: bool) -> bool:
        """Return whether all ranks stop after this step; the same answer on every rank.

        A wish is answered about two seconds later, because a vote is waited for only when the next one begins.
        """
        if self._backend is None:
            return wants_to_stop
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        num_steps, self._window = self._window, 1
        if self._work is not None:
            self._work.wait()
            num_wishes, sum_step_ns = self._ballot.tolist()
            if num_wishes:
                return True
            # All ranks divide the same sum, and so vote after the same step again.
            wanted = _VOTE_INTERVAL_NS / max(sum_step_ns / self._num_ranks, 1.0)
            self._window = min(max(round(wanted), 1), _MAX_STEPS_BETWEEN_VOTES)
        now_ns = self._clock()
        self._ballot = torch.tensor([float(wants_to_stop), (now_ns - self._began_ns) / num_steps], dtype=torch.float64)
        self._began_ns = now_ns
        self._work = self._backend.allreduce([self._ballot])
        self._steps_left = self._window
        return False

    def close(self) -> None:
        """Wait for a vote that is on its way."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def side_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for messages that are not training; None in a world of one.

    Collective: every rank of the default process group calls this.
    """
    if dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="hpcpace_side"
    )
    return group


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One rank's view of a training job.

    Attributes:
        plan: what to train.
        config: all settings; those of training are in the plan.
        info: this rank's place; its local_rank must be known.
        comm: an mpi4py communicator of all ranks, or None.
        data: what to train on.
        run_dir: the run directory; chosen from job or time when None.
        progress: one of `hpcpace.train.result.STYLES`; only rank 0 shows any.
        rendezvous: where several ranks without MPI or torchrun meet.
    """

    plan: TrainPlan
    config: Config
    info: RankInfo
    comm: Any
    data: TrainingData
    run_dir: Path | None
    progress: str
    rendezvous: Rendezvous | None = None


def train(job: TrainJob) -> TrainResult:
    """Train as planned, or resume a training that was stopped.

    SIGUSR1, and SIGTERM where there are checkpoints, let all ranks stop after the same step with a checkpoint.

    Collective: every rank of the job calls this, in its main thread. When it returns, the traces of all ranks are
    closed.

    Raises:
        DataError: ranks read different data, or a checkpoint does not fit.
        ConfigError: a fault names a host that is not in the job.
        WorldError: a GPU is requested and there is none, or the ranks cannot reach each other.
        TrainingFailed: out of memory, or the checkpoint at a stop cannot be written.
    """
    settings = job.config.of(WorldConfig)
    early = EarlySignal()
    with (
        early.listening(signal.SIGUSR1),
        init_process_group(
            job.info,
            job.comm,
            backend=settings.backend,
            device=settings.device,
            interface=settings.interface,
            rendezvous=job.rendezvous,
            timeout_s=settings.timeout_s,
            start_timeout_s=settings.start_timeout_s,
        ) as device,
    ):
        start = agree_on_start(
            job.plan, info=job.info, name=_name(job.plan), run_dir=job.run_dir, data_digest=job.data.digest()
        )
        try:
            result = _train(job, start, early, device)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, attempt=start.attempt, plan=job.plan, info=job.info, device=device) from error
        dist.barrier()
    return result


def _train(job: TrainJob, start: StartPoint, early: EarlySignal, device: torch.device) -> TrainResult:
    plan, settings, place = job.plan, job.plan.settings, job.plan.mesh.coordinates(job.info.rank)
    replica = build_replica(plan, rank=job.info.rank, device=device, host=job.info.host)
    optimizer = build_optimizer(
        replica.parameters(),
        learning_rate=settings.learning_rate,
        zero_group=replica.replicas if settings.zero == 1 else None,
    )
    rate = settings.outer_learning_rate
    outer = None if rate is None else OuterOptimizer(replica.parameters(), rate)
    group = side_group(job.config.of(WorldConfig).timeout_s)
    checkpoints = Checkpoints(
        start.run.checkpoint_dir,
        plan=plan,
        place=place,
        replica=replica,
        optimizer=optimizer,
        outer=outer,
        group=group,
        data_digest=job.data.digest(),
    )
    if start.checkpoint is not None:
        checkpoints.load(start.checkpoint)
    with session(
        name=_name(plan),
        config=job.config,
        world=job.info,
        comm=job.comm,
        mesh=plan.mesh.as_dict(),
        coords=place.as_dict(),
        samples_unit=plan.samples_unit,
        warmup_steps=settings.num_warmup_steps,
        first_step=start.history.num_steps,
        run_dir=start.run.path,
        record=_facts(job, start),
    ) as observed:
        for watched in replica.watched:
            observed.watch(watched)
        training = _Training(job, start, device, replica, optimizer, outer, checkpoints, StopVote(group), observed)
        stopped_by = training.run(early)
        if stopped_by:  # it goes on in another attempt
            observed.summary = False
    memory: list[Any] = [None] * job.info.world_size
    tensors = training.memory.facts() if training.memory else {}
    dist.all_gather_object(memory, {**memory_facts(device, rank=job.info.rank, host=job.info.host), **tensors})
    result = TrainResult(
        losses=training.log.losses,
        evaluations=training.evaluations,
        samples_per_s=training.samples_per_s,
        samples_unit=plan.samples_unit,
        dtype=settings.dtype,
        first_step=start.history.num_steps,
        stopped_by=stopped_by,
        peak_memory=memory,
        run=None if observed.run is None else observed.run.path,
    )
    if job.info.rank == 0 and observed.attempt is not None:
        write_result(observed.attempt, result)
    return result


@dataclass
class _Training:
    """The steps of one rank, and their results so far."""

    job: TrainJob
    start: StartPoint
    device: torch.device
    replica: Replica
    optimizer: torch.optim.Optimizer
    outer: OuterOptimizer | None
    checkpoints: Checkpoints
    vote: StopVote
    observed: Session
    samples_per_s: float = 0.0
    memory: TensorMemory | None = None

    def __post_init__(self) -> None:
        plan, info, history = self.job.plan, self.job.info, self.start.history
        place = plan.mesh.coordinates(info.rank)
        self._rows, self._samples = plan.rows(place), plan.credited_samples(place)
        knows_loss = place.pp == plan.mesh.pp - 1 and place.tp == 0
        self.log = LossLog(weight=knows_loss / plan.mesh.dp, device=self.device)
        self.log.losses.extend(history.losses)
        self.evaluations = list(history.evaluations)
        self._evaluator = Evaluator(plan, data=self.job.data, replica=self.replica, place=place, device=self.device)
        self._emulation = self._emulated()
        work = _work_of_device(self.device)
        if self._emulation is not None:
            work = {"clock": self._emulation.clock, "spend": self._emulation.wait}
        self._injector = Injector(plan.faults, seed=plan.settings.seed, rank=info.rank, host=info.host, **work)
        self._injector.attach(self.replica.pieces())

    def _emulated(self) -> Emulation | None:
        """Let the pieces of the model take the time that they are given, if they are given one."""
        plan = self.job.plan
        if plan.settings.compute_ms is None:
            return None
        if self.device.type != "cpu":
            raise ConfigError("--compute-ms emulates the computation of CPUs: add --device cpu, or leave it out")
        emulation = Emulation(plan.settings.compute_ms, plan.shape, plan.mesh, zero=plan.settings.zero)
        for stage in self.replica.stages:
            for piece in stage.pieces():
                emulation.attach(piece, is_head=isinstance(stage, GPT2) and piece is stage.head)
            if plan.settings.zero == 3:
                # The hooks of backward make views, and fully_shard warns of an output that is one.
                stage.register_forward_hook(lambda _, __, output: output.clone(), prepend=True)
        return emulation

    def _check_emulation(self) -> None:
        """Warn of computation that took longer than it was given, which no wait makes good."""
        emulation = self._emulation
        if emulation is not None and emulation.overrun > _MAX_OVERRUN and self.job.info.rank == 0:
            print(
                f"hpcpace: warning: computation took {emulation.overrun:.0%} longer than --compute-ms "
                f"{self.job.plan.settings.compute_ms:g}: give more, or fewer ranks a core",
                file=sys.stderr,
                flush=True,
            )

    def run(self, early: EarlySignal) -> str:
        """Do the remaining steps; return the signal that ended them early, or an empty text."""
        settings, unit = self.job.plan.settings, self.job.plan.samples_unit
        first_step = self.start.history.num_steps
        style = self.job.progress if self.job.info.rank == 0 else "off"
        stops, begin_ns = False, time.monotonic_ns()
        with (
            progress_view(style, num_steps=settings.steps, first_step=first_step, unit=unit) as view,
            early.listening(signal.SIGTERM) if settings.checkpoint_every else nullcontext(),
        ):
            for step in range(first_step, settings.steps):
                num_timed = step + 1 - first_step - settings.num_warmup_steps
                if num_timed == 1:
                    begin_ns = time.monotonic_ns()
                    if self._emulation is not None:
                        self._emulation.forget()
                self._train_step(step)
                stops = self.vote.stops(bool(early.name)) and step + 1 < settings.steps
                flags = self._evaluate_if_due(step + 1, view) | self._save_if_due(step + 1, view, stops=stops)
                self.observed.step(samples=self._samples, flags=flags)
                if num_timed > 0:
                    duration_s = (time.monotonic_ns() - begin_ns) / NS_PER_S
                    self.samples_per_s = num_timed * self.job.plan.samples_per_step / duration_s
                # No rank waits for the losses: they are shown a step or so later, when they have arrived.
                if (step + 1) % settings.log_every == 0:
                    self.log.gather()
                view.show(step + 1, losses=self.log.poll(), samples_per_s=self.samples_per_s)
                if stops:
                    break
            losses = self.log.finish()
            view.show(len(losses), losses=losses, samples_per_s=self.samples_per_s)
            self.vote.close()
        self._check_emulation()
        return (early.name or "a signal to another rank") if stops else ""

    def _train_step(self, step: int) -> None:
        settings, replica, observed = self.job.plan.settings, self.replica, self.observed
        self._injector.begin_step(step)
        with observed.phase("data"), self._injector.slowed("data"):
            batch = self.job.data.batch(step, seed=settings.seed, batch_size=settings.batch_size, rows=self._rows)
            inputs, targets = to_device(batch, self.device, master_dtype(settings.dtype))
        # In the first step, if that is one of the warm-up, for it takes a little longer.
        is_measured = step == self.start.history.num_steps and settings.num_warmup_steps > 0
        meter = ActivationMeter(replica.parameters())
        with meter.measuring() if is_measured else nullcontext():
            self.log.add(replica.forward_backward(inputs, targets))
        if replica.tied_group is not None:
            with observed.phase("grad_sync"):
                replica.sync_tied_gradients()
        self.optimizer.step()
        if is_measured:
            self.memory = self._tensor_memory(meter)
        self.optimizer.zero_grad()
        if settings.sync_every > 1 and (step + 1) % settings.sync_every == 0:
            with observed.phase("grad_sync"):
                replica.average()
            if self.outer is not None:
                self.outer.step()

    def _tensor_memory(self, meter: ActivationMeter) -> TensorMemory:
        """Return the memory of this rank's tensors, after a step whose gradients are still there."""
        parameters = list(self.replica.parameters())
        return TensorMemory(
            parameters_bytes=tensor_bytes(parameters),
            gradients_bytes=tensor_bytes(parameter.grad for parameter in parameters),
            optimizer_bytes=state_bytes(self.optimizer),
            activations_bytes=meter.peak_bytes,
        )

    def _evaluate_if_due(self, num_steps: int, view: ProgressView) -> StepFlag:
        every = self.job.plan.settings.eval_every
        if not every or num_steps % every:
            return StepFlag.NONE
        with self.observed.phase("eval"):
            evaluation = self._evaluator.evaluate(num_steps)
        self.evaluations.append(evaluation.facts())
        view.note(str(evaluation))
        return StepFlag.EVAL

    def _save_if_due(self, num_steps: int, view: ProgressView, *, stops: bool) -> StepFlag:
        every = self.job.plan.settings.checkpoint_every
        if not stops and (not every or num_steps % every):
            return StepFlag.NONE
        with self.observed.phase("checkpoint"):
            history = TrainingHistory(
                num_steps=num_steps, losses=tuple(self.log.finish()), evaluations=tuple(self.evaluations)
            )
            try:
                path = self.checkpoints.save(history)
            except TrainingFailed as error:
                if stops:
                    raise
                if self.job.info.rank == 0:
                    reason = process_redaction().text(str(error))
                    print(f"hpcpace: warning: {reason}; training goes on", file=sys.stderr, flush=True)
            else:
                view.note(f"after {num_steps} steps  checkpoint {path}")
        return StepFlag.CHECKPOINT


def _name(plan: TrainPlan) -> str:
    return f"gpt2-{plan.preset}" if plan.settings.model == "gpt2" else plan.settings.model


def _facts(job: TrainJob, start: StartPoint) -> dict[str, Any]:
    plan = job.plan
    return {
        "model": plan.facts(),
        "parallelism": parallelism_facts(plan),
        "data": job.data.facts(),
        "inject": [{"spec": s, **asdict(f)} for s, f in zip(plan.settings.inject, plan.faults, strict=True)],
        "resumed": start.facts(),
    }


def _work_of_device(device: torch.device) -> dict[str, Any]:
    """Return how an injector measures work on a device and adds to it; its own defaults are those of a CPU."""
    if device.type != "cuda":
        return {}

    def clock() -> int:
        torch.cuda.synchronize(device)
        return time.monotonic_ns()

    return {"clock": clock, "spend": time.sleep}


_FORWARD_SHARE = 1 / 3
"""Of forward and backward: a matrix product has two of its size in its backward pass."""


def block_share(shape: ModelShape) -> float:
    """Return the share of a model's computation that one block has: between 0 and 1.

    Of GPT-2 by the parameters that take part in matrix products, 12 w^2 in a block and w V in the head; the blocks of
    ResNet-18 have equal shares, for a stage that doubles the channels halves the image.
    """
    if isinstance(shape, GPT2Shape):
        block = 12 * shape.width**2
        return block / (shape.num_layers * block + shape.width * shape.vocabulary)
    return 1 / (len(shape.widths) * shape.blocks_per_stage)


class Emulation:
    """Lets the pieces of a rank's model take their time.

    Args:
        compute_ms: milliseconds that forward and backward of one sequence or image take on the whole model.
        shape: the whole model's shape.
        mesh: of the run; tensor parallelism cuts each piece.
        zero: what is sharded across replicas.
        sleep: waits for a number of seconds.
        wall_clock, processor_clock: nanoseconds; replaced in tests, as is `sleep`.
    """

    def __init__(
        self,
        compute_ms: float,
        shape: ModelShape,
        mesh: Mesh,
        *,
        zero: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], int] = time.monotonic_ns,
        processor_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._sample_ns = compute_ms * NS_PER_MS / mesh.tp
        self._block_share = block_share(shape)
        self._head_share = 1 - self._block_share * shape.num_layers if isinstance(shape, GPT2Shape) else 0.0
        # Pieces that wait for other ranks are measured without these waits, at the price of those for a core.
        self._has_messages = mesh.tp > 1 or zero > 1
        self._sleep, self._wall_clock, self._processor_clock = sleep, wall_clock, processor_clock
        self._waited_ns = 0
        self._debt_ns = 0.0
        self._target_ns, self._overrun_ns = 0.0, 0.0

    @property
    def overrun(self) -> float:
        """By what share of the time that it was given the computation took longer; 0 if it did not."""
        return self._overrun_ns / self._target_ns if self._target_ns else 0.0

    def forget(self) -> None:
        """Begin to count overruns anew, behind a warm-up in which things are compiled and allocated."""
        self._target_ns, self._overrun_ns = 0.0, 0.0

    def clock(self) -> int:
        """Return the time of the work done so far, nanoseconds, what was waited for it included."""
        return self._processor_clock() + self._waited_ns if self._has_messages else self._wall_clock()

    def wait(self, duration_s: float) -> None:
        """Let `clock` advance by a duration, in seconds."""
        begin_ns = self._wall_clock()
        self._sleep(duration_s)
        self._waited_ns += self._wall_clock() - begin_ns

    def attach(self, piece: Any, *, is_head: bool) -> None:
        """Let forward and backward of a torch module take their time; both have samples in the first dimension."""
        whole_ns = self._sample_ns * (self._head_share if is_head else self._block_share)
        num_samples, begin_ns = 0, 0

        def before_forward(_: Any, arguments: tuple[Any, ...]) -> None:
            nonlocal num_samples, begin_ns
            num_samples, begin_ns = len(arguments[0]), self.clock()

        def before_backward(*_: Any) -> None:
            nonlocal begin_ns
            begin_ns = self.clock()

        def after_forward(*_: Any) -> None:
            self._fill(begin_ns, whole_ns * num_samples * _FORWARD_SHARE)

        def after_backward(*_: Any) -> None:
            self._fill(begin_ns, whole_ns * num_samples * (1 - _FORWARD_SHARE))

        linears: list[Any] = [module for module in piece.modules() if isinstance(module, nn.Linear)]
        for linear in linears:
            linear.forward = partial(_wide_product, linear)
        piece.register_forward_pre_hook(before_forward)
        piece.register_forward_hook(after_forward)
        piece.register_full_backward_pre_hook(before_backward)
        piece.register_full_backward_hook(after_backward)

    def _fill(self, begin_ns: int, target_ns: float) -> None:
        """Wait for what the work since a time leaves of its target.

        What a piece or a wait takes too long, the next ones lack, unless it is more than they have.
        """
        self._target_ns += target_ns
        self._debt_ns += target_ns - (self.clock() - begin_ns)
        if self._debt_ns > 0:
            before_ns = self.clock()
            self.wait(self._debt_ns / NS_PER_S)
            self._debt_ns -= self.clock() - before_ns
        if self._debt_ns < -target_ns:
            self._overrun_ns += -target_ns - self._debt_ns
            self._debt_ns = -target_ns


def _wide_product(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute a linear layer in float32 where autocast rounds what it takes and returns.

    That is what hardware for such types does, and torch takes 2.5 times as long without this on CPUs that lack it.
    """
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return functional.linear(hidden, linear.weight, linear.bias)
    narrow = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        rounded = (
            None if given is None else given.to(narrow).float() for given in (hidden, linear.weight, linear.bias)
        )
        return functional.linear(*rounded).to(narrow)
