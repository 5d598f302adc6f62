"""The public interface: a session observes the training job that runs inside it.

    with hpcpace.session(name="mine") as session:
        for batch in loader:                  # data, forward, backward, optimizer and others are found by themselves
            ...
            session.step(samples=len(batch))  # ends a step

A session runs in somebody else's job and ends it only where it is asked to end hangs: what it cannot record costs one
warning on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

from hpcpace.core.config import NO_POLICY, Config
from hpcpace.core.environment import RankInfo, host_identity, locate
from hpcpace.core.errors import ClockSyncError, WorldError
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.settings import OPTED_OUT_LINE, is_opted_out, unknown_sentence, unknown_variables
from hpcpace.observe.card import Card, print_on_stderr
from hpcpace.observe.ends import error_in_flight
from hpcpace.observe.exporters import MeasureParts
from hpcpace.observe.guest import Warner
from hpcpace.observe.joined import (
    Attendance,
    JoinedRank,
    NotEveryRank,
    SessionSettings,
    coordinate,
    find_rank,
    resolved_config,
    shared_settings,
)
from hpcpace.observe.pacing import OpenPacing, Pacer
from hpcpace.observe.recording import Recording
from hpcpace.observe.settings import ClockConfig, ProbeConfig, TraceConfig
from hpcpace.observe.steps import InferredSteps, StepFinder, StepFrom
from hpcpace.trace.recorder import NullRecorder
from hpcpace.trace.schema import StepFlag
from hpcpace.world.deadline import Deadline
from hpcpace.world.messages import Messages, NoMessages, own_store

START, END = "start", "end"
_RECORDED_ALREADY = "this session records nothing, because another one does, or `hpcpace trace --step-from`"
_NAMES_STEPS = (
    "`hpcpace trace` records this job: the session in the script names its steps, samples and phases, and its other "
    "arguments do not count"
)


@dataclass(kw_only=True, eq=False, repr=False)
class Session(SessionSettings):
    """Observes a training job between `__enter__` and `__exit__`; `hpcpace.session` is this class.

    Collective: every rank of the job enters and leaves it. With several ranks, enter it after
    `torch.distributed.init_process_group`, or pass an MPI communicator as `comm`.

    Args:
        name: names the run directory.
        run_dir: the run directory; by default `runs/JOB-NAME` or `runs/TIME-NAME`.
        config: settings; by default merged from the centre's file, `config_file` and the environment.
        config_file: a TOML file with settings.
        mesh: the size of each parallel dimension, like `{"dp": 2, "pp": 2, "tp": 1}`.
        coords: this rank's place in each dimension.
        samples_unit: what `step(samples=...)` counts: images, tokens, ...
        warmup_steps: number of first steps that the report leaves out.
        first_step: number of the first step, for a training that resumes from a checkpoint.
        record: further facts for run.json.
        world: this rank's place; by default read from the environment.
        comm: an mpi4py communicator of all ranks; by default torch's default group is used.
        step_from: what ends a step in a script that never calls `step`: `auto` (found out), `optimizer`, `backward`, or
            `optimizer:2` for every second one; None if the script calls `step`.
        pace: the policy that delays early ranks, see docs/pacing.md; by default that of the settings.
        trace_dir: folder for traces while the job runs, such as a node-local disk, or `auto`; by default that of the
            settings.
        steps: the steps to record in detail, like `100:200`; by default those of the settings.
        detail: what is recorded of them: `full`, `collectives` or `steps`; by default that of the settings.
        keep_last: how many of the last steps the trace keeps at least, 0 for all; by default that of the settings.
        summary: whether rank 0 prints the head of the report on stderr at the end; by default that of the settings.

    Attributes:
        phase: `with session.phase("data"): ...` marks a part of the step; the names are those of
            `hpcpace.trace.schema.Phase` in lower case. Use it in the training thread only: two threads in one phase
            at a time would mix up their begin times.
        run: the run directory; None if it could not be made.
        attempt: the folder of this attempt in it.
        recorded: once the session is over, what it has recorded: `steps`, their number, `steps_from`, how they were
            found, the names of `phases`, and `collectives_by`, the layer that observes collectives: `compiled` or
            `Python`; None if it recorded nothing.
        card: what rank 0 prints at the end, once the session has ended in order; None without it.
        show_card: what prints it.

    A session never ends the job, but for a hang where `hang.on_hang` is `stop`. If settings and environment contradict
    each other, it warns once and records nothing.
    In a job of `hpcpace trace` that finds steps by itself, a session records into that trace and names its steps.
    If the job leaves SIGTERM its default action, the session writes what it has in memory before that action.
    """

    # What paces is plugged in by the package, as observation imports no pacing.
    open_pacing: ClassVar[OpenPacing | None] = None
    # So is what divides steps into parts, as observation imports no formulas.
    measure_parts: ClassVar[MeasureParts | None] = None
    # Called before a session starts in a process that belongs to a traced job.
    before_start: ClassVar[Callable[[], None] | None] = None
    # Torch's operators and hooks are there once in a process, and so is what observes them; a fork is another process.
    _recorded_pid: ClassVar[int] = 0
    _recorded_by: ClassVar[Session | None] = None

    def __post_init__(self) -> None:
        self.run: RunDirectory | None = None
        self.attempt: Attempt | None = None
        self.phase: Callable[[str], AbstractContextManager[Any]] = NullRecorder().phase
        self._warner = Warner(self.environ)
        self._config = Config()
        self._messages: Messages | NoMessages | None = None
        self._recording: Recording | None = None
        self._is_inside = False  # of another session, whose recording this is
        self.recorded: dict[str, Any] | None = None
        self._known_error: BaseException | None = None
        self._probe: Callable[[str], None] | None = None
        self._num_ranks = 0
        self.card: Card | None = None
        self.show_card: Callable[[str], None] = print_on_stderr

    @property
    def rank(self) -> int | None:
        """Number of this rank; None while it is unknown."""
        return self._warner.rank

    @property
    def is_recording(self) -> bool:
        """Whether this rank records a trace."""
        return self._recording is not None

    def watch(self, model: Any) -> None:
        """Record the microbatches of a stage of `torch.distributed.pipelining`; modules are seen without this."""
        if self._recording is not None:
            self._recording.phases.watch(model)

    def step(self, samples: int = 0, *, flags: StepFlag = StepFlag.NONE) -> None:
        """End a step.

        Every rank calls this equally often; none waits for another here.

        Args:
            samples: this rank's share of the global batch; the shares of all ranks add up to it.
            flags: what marks the step as special; warm-up is added automatically.
        """
        recording = self._recording
        if recording is None:
            return
        try:
            end_ns = recording.now()
            recording.name_steps()
            recording.end_step(end_ns, samples, flags | recording.phases.end_step())
        except Exception as error:  # the boundary to somebody else's job
            self._end_early(error)
        else:
            recording.begin_step()

    def pacing_point(self, name: str = "point") -> AbstractContextManager[None]:
        """Name a block that waits for all ranks, and that hpcpace cannot see: `with session.pacing_point(): ...`.

        hpcpace sees operations of torch.distributed without it; use it for those of MPI or of other libraries.
        """
        return nullcontext() if self._recording is None else self._recording.paced_block(name)

    def metrics(self, last_steps: int | None = None) -> dict[str, float]:
        """Return where this rank's steps went, for loggers of your own: since the last call, or of the last steps.

        It reads no file, sends nothing and waits for nobody, in any thread. The keys are those of docs/attach.md:
        `hpcpace/steps`, how many steps these are, `hpcpace/step_ms`, their mean, `hpcpace/forward_ms` and other parts
        of it, which add up to it, `hpcpace/samples_per_s` of this rank, and `hpcpace/memory_mib`. `communication_ms` is
        the time blocked in communication, which includes waiting for slower ranks: the report divides it.

        Args:
            last_steps: so many of the last steps, up to 1,024, whatever earlier calls returned.

        Returns:
            Nothing where no step has ended since the last call, and where nothing is recorded.
        """
        recording = self._recording
        if recording is None or recording.figures is None or Session._recorded_pid != os.getpid():
            return {}
        try:
            return recording.figures.take(last_steps)
        except Exception as error:  # the boundary to somebody else's job
            self._warner.warn(f"session.metrics() fails: {error or type(error).__name__}")
            return {}

    def before_stop(self, told: Callable[[str], object]) -> None:
        """Have a function called with the verdict before `hang.on_hang` ends this process, in another thread."""
        if self._recording is not None and self._recording.watchdog is not None:
            self._recording.watchdog.stopping = told

    def __enter__(self) -> Session:
        self._known_error = error_in_flight(None)
        if self.is_opted_out:
            with suppress(WorldError):
                if find_rank(self).rank == 0:
                    self._warner.tell(OPTED_OUT_LINE)
            return self
        before_start = type(self).before_start
        if before_start is not None:
            before_start()
        if Session._recorded_pid == os.getpid():
            self._enter_recorded(Session._recorded_by)
            return self
        try:
            self._start()
        except Exception as error:  # the boundary to somebody else's job, which goes on without us
            self._explain(error)
            if isinstance(error, (WorldError, ClockSyncError)):
                self._messages = None  # the others have not come, and will not come to the end either
            self._stop(in_order=False)
        return self

    def _enter_recorded(self, outer: Session | None) -> None:
        """Use the recording of another session, if that one finds steps by itself and the script names them."""
        recording = None if outer is None else outer._recording
        if outer is not None and recording is not None and recording.takes_names and self.step_from is None:
            recording.await_names()
            self._is_inside, self._recording, self.phase = True, recording, outer.phase
            self.run, self.attempt, self._warner.rank = outer.run, outer.attempt, outer.rank
            if outer.rank == 0:
                self._warner.tell(_NAMES_STEPS)
            return
        with suppress(WorldError):
            self._warner.rank = find_rank(self).rank
        self._warner.warn_once_for_all(_RECORDED_ALREADY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A script that ends torch's group in a `finally` block leaves the session there, without handing an error down.
        error = error or error_in_flight(self._known_error)
        if self._is_inside:
            self._leave_recorded()
            return
        has_recorded = self.is_recording
        is_in_order = error is None and kind is None
        self._stop(in_order=is_in_order, error=error)
        if self._probe is not None and is_in_order:
            self._probe(END)
        if self._messages is not None and is_in_order:
            self._leave_together(self._messages)
        if has_recorded and is_in_order:
            self._make_card()

    def _leave_recorded(self) -> None:
        """Leave the recording to the session that it belongs to."""
        self.phase = NullRecorder().phase
        if self._recording is not None:
            self._recording.await_names(False)
            self.recorded = self._recording.recorded()
        self._is_inside, self._recording = False, None

    def _make_card(self) -> None:
        """Have the card made on rank 0, unless it is not wanted."""
        trace, attempt = self._config.of(TraceConfig), self.attempt
        if self.rank != 0 or attempt is None or self.summary is False or not trace.summary:
            return
        try:
            self.card = Card(
                attempt, world_size=self._num_ranks, timeout_s=trace.summary_timeout_s, show=self.show_card
            )
            self.card.start()
        except Exception as error:  # the boundary to somebody else's job
            self.card = None
            self._warner.warn(f"no summary at the end: {error or type(error).__name__}")

    def _start(self) -> None:
        messages, world = self._meet()
        if self.is_switched_off:
            return
        deadline = Deadline(self._config.of(TraceConfig).start_timeout_s)
        identity = host_identity()
        host_keys = messages.allgather(identity.host_key, deadline.left_s)
        joined = JoinedRank(
            settings=self,
            config=self._config,
            messages=messages,
            identity=identity,
            host_keys=host_keys,
            world=locate(world, host_keys),
            deadline=deadline,
        )
        self._num_ranks = world.world_size
        attempt = joined.make_attempt(self._warner.warn)
        if attempt is not None:
            self.attempt, self.run = attempt, RunDirectory(attempt.path.parent)
        if attempt is None or not self._config.of(TraceConfig).enabled:
            if self._config["pace.policy"] != NO_POLICY and world.rank == 0:
                self._warner.warn("the job is not paced: pacing needs a trace")
            return
        self._probe = partial(
            probe_in_job,
            settings=self._config.of(ProbeConfig),
            world=joined.world,
            attempt=attempt,
            environ=self.environ,
            warn=self._warner.warn_once_for_all,
        )
        if self._config.of(ProbeConfig).when == START:
            self._probe(START)
            joined = replace(joined, deadline=Deadline(self._config.of(TraceConfig).start_timeout_s))
        steps = None
        if self.step_from is not None:
            steps = StepFinder(StepFrom.parse(self.step_from), warn=self._warner.warn_once_for_all)
        # Before anything that can fail on one rank alone: the others would wait for it here.
        make_pacer = self._open_pacing(joined, attempt) if self._config["pace.policy"] != NO_POLICY else None
        recording = self._recording = Recording(
            joined,
            attempt,
            self._warner,
            steps=steps,
            make_pacer=make_pacer,
            measure_parts=type(self).measure_parts,
        )
        if steps is not None:
            steps.sink = InferredSteps(recording, failed=self._end_early)
        recording.start()
        Session._recorded_pid, Session._recorded_by = os.getpid(), self
        self.phase = recording.recorder.phase

    def _open_pacing(self, joined: JoinedRank, attempt: Attempt) -> Callable[[Any], Pacer]:
        open_pacing = type(self).open_pacing
        if open_pacing is None:
            raise WorldError("this session cannot pace the job: start it as `hpcpace.session`")
        return open_pacing(
            self._config,
            comm=self.comm,
            world=joined.world,
            host_key=joined.identity.host_key,
            attempt=attempt,
            first_step=self.first_step + max(self.warmup_steps, 1),
            warn=self._warner.warn,
        )

    @property
    def is_opted_out(self) -> bool:
        """Whether the user wants this job without hpcpace; a program that brings its own settings has decided that."""
        return self.config is None and is_opted_out(self.environ)

    @property
    def is_switched_off(self) -> bool:
        """Whether user or site want no recording; of a program that brings its own settings, only the trace is off."""
        return self.config is None and not self._config.of(TraceConfig).enabled

    def _meet(self) -> tuple[Messages | NoMessages, RankInfo]:
        """Find settings and place, and meet the other ranks; they learn it where this rank cannot take part."""
        self._config = Config()
        self._warner.rank = None if self.world is None else self.world.rank
        try:
            self._config = resolved_config(self)
            world = find_rank(self)
        except Exception as error:  # the boundary to somebody else's job, whose other ranks wait for our answer
            problem = str(error) or type(error).__name__
            try:
                self._take_roll(self.world, problem)
            except NotEveryRank as decision:
                if decision.is_told and problem.startswith(str(decision)):
                    raise decision from error  # another rank has the same problem, and warns of it
            except Exception:  # they are not connected; the problem is what the user learns
                pass
            raise
        self._warner.rank = world.rank
        # Of a program that brings its own settings, no variable counts.
        if world.rank == 0 and self.config is None and (unknown := unknown_variables(self.environ)):
            self._warner.warn(f"{unknown_sentence(unknown)}; ignored")
        self._messages = self._take_roll(world)
        return self._messages, world

    def _take_roll(self, world: RankInfo | None, problem: str = "") -> Messages | NoMessages:
        return coordinate(
            world,
            self.comm,
            Attendance(problem=problem, settings=shared_settings(self._config)),
            timeout_s=self._config.of(TraceConfig).start_timeout_s,
        )

    def _explain(self, error: Exception) -> None:
        """Warn that nothing is recorded, unless another rank does."""
        if isinstance(error, NotEveryRank) and error.is_told:
            return
        is_of_all = isinstance(error, (WorldError, ClockSyncError)) and not isinstance(error, NotEveryRank)
        warn = self._warner.warn_once_for_all if is_of_all else self._warner.warn
        warn(f"nothing is recorded: {str(error) or type(error).__name__}")

    def _end_early(self, error: Exception) -> None:
        if self._recording is not None:
            self._warner.warn(f"recording ends at step {self._recording.step}: {error or type(error).__name__}")
            self._stop(in_order=False)

    def _stop(self, *, in_order: bool, error: BaseException | None = None) -> None:
        recording, self._recording = self._recording, None
        self.phase = NullRecorder().phase
        if recording is not None:
            Session._recorded_pid, Session._recorded_by = 0, None
            recording.close(in_order=in_order, error=error)
            self.recorded = recording.recorded()

    def _leave_together(self, messages: Messages | NoMessages) -> None:
        """Wait for the other ranks, up to a timeout, so that rank 0 may read every trace from here on."""
        is_meant = self.step_from is None
        try:
            with closing(messages):
                messages.meet(self._config.of(ClockConfig).leave_timeout_s(is_meant=is_meant))
            self._messages = None
        except Exception as error:  # the job may have ended torch's process group already: no reason to fail it
            if is_meant:
                self._warner.warn_once_for_all(f"the ranks did not leave the session together: {error}")


def probe_in_job(
    when: str,
    settings: ProbeConfig,
    *,
    world: RankInfo,
    attempt: Attempt,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
) -> None:
    """Probe the hosts of a job if that is wanted now, and save the probe with the attempt.

    Collective: every rank of the job calls this.

    Args:
        when: `start` or `end`, whichever it is now.
        settings: when it is wanted, and for how long.
        world: this rank's place.
        attempt: where the probe is saved.
        environ: of this rank.
        warn: takes a warning on why there is no probe.
    """
    if settings.when != when or world.world_size < 2:
        return
    try:
        _probe(when, settings, world=world, attempt=attempt, environ=environ)
    except Exception as error:  # the boundary to somebody else's job
        warn(f"the job is not probed ({str(error).partition(chr(10))[0] or type(error).__name__})")


def _probe(when: str, settings: ProbeConfig, *, world: RankInfo, attempt: Attempt, environ: Mapping[str, str]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed connects no ranks")
    # Imported this late because most jobs are not probed.
    from hpcpace.probe.start import begin_record, probe_world
    from hpcpace.probe.sweep import Sweep
    from hpcpace.probe.world import measure_parts

    store, _ = own_store(settings.timeout_s)
    own = torch.distributed.PrefixStore(f"probe/{attempt.path}/{when}", store)
    is_on_gpu = torch.cuda.is_available() and "nccl" in torch.distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
    ranks = probe_world(
        world, own, device=device, backend="nccl" if is_on_gpu else "gloo", timeout_s=settings.timeout_s
    )
    record = begin_record(ranks, environ, time_s=settings.time_s)
    record = measure_parts(ranks, [Sweep()], record)
    if ranks.is_first:
        attempt.write_json(attempt.probe_json, record.to_json())
