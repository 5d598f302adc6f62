"""The public interface: a session observes the training job that runs inside it.

    with hpcpace.session(name="mine") as session:
        session.watch(model)                  # forward phases
        for batch in loader:                  # data, backward, grad_sync, optimizer and gc are found by themselves
            ...
            session.step(samples=len(batch))  # ends a step

A session in somebody else's job never ends that job: what cannot be recorded is one warning on stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcpace import __version__
from hpcpace.config import Config, load_config
from hpcpace.errors import ClockSyncError, WorldError
from hpcpace.observe.coordination import Coordinator, coordinate
from hpcpace.observe.exchange import open_exchange
from hpcpace.observe.host_snapshot import save_host_snapshots
from hpcpace.observe.network import find_network_counters
from hpcpace.observe.pacing import PacedBlock, close_pacer, open_pacer
from hpcpace.observe.record import run_record
from hpcpace.observe.recording import Recording
from hpcpace.observe.roll_call import Attendance, NotEveryRank
from hpcpace.pace.pacer import Pacer
from hpcpace.pace.settings import NO_POLICY
from hpcpace.redaction import Redaction
from hpcpace.rundir import Attempt, RunDirectory, default_run_path
from hpcpace.trace.recorder import NullRecorder
from hpcpace.trace.schema import StepFlag, TraceHeader
from hpcpace.world.clock import ClockSync
from hpcpace.world.deadline import Deadline, in_time
from hpcpace.world.environment import HostIdentity, RankInfo, host_identity, locate, process_environ, rank_info


class Session:
    """Observes a training job between `__enter__` and `__exit__`; `hpcpace.session` is this class.

    Collective: every rank of the job enters and leaves it. In a world of several ranks it is entered after
    `torch.distributed.init_process_group`, or with an MPI communicator as `comm`.

    Args:
        name: what the run directory is called after.
        run_dir: the run directory; `runs/JOB-NAME` or `runs/TIME-NAME` when not given.
        config: settings; merged from the centre's file, `config_file` and the environment when not given.
        config_file: a TOML file with settings.
        mesh: size of each parallel dimension, like `{"dp": 2, "pp": 2, "tp": 1}`.
        coords: this rank's place in each dimension.
        samples_unit: what `step(samples=...)` counts: images, tokens, ...
        warmup_steps: first steps, which the report leaves out.
        first_step: number of the first step, where a training goes on from a checkpoint.
        record: further facts for run.json.
        world: this rank's place; read from the environment when not given.
        comm: an mpi4py communicator of all ranks; torch's default group is used when not given.
        step_per_optimizer: end a step after each step of an optimizer, for scripts that never call `step`.
        pace: the policy by which early ranks are held back, see docs/pacing.md; that of the settings when not given.

    Attributes:
        phase: `with session.phase("data"): ...` marks a stretch of the step; the names are those of
            `hpcpace.trace.schema.Phase` in lower case. For the thread that trains: two threads at once in one phase
            would mix up their begins.
        run: the run directory, None where it could not be made.
        attempt: this start's folder in it.

    Nothing here ends the job: where settings or environment contradict each other, nothing is recorded, with one
    warning. Where the job leaves SIGTERM its default action, what is in memory is written before that action.
    """

    phase: Callable[[str], AbstractContextManager[Any]]
    _config: Config
    _world: RankInfo | None

    def __init__(
        self,
        *,
        name: str = "train",
        run_dir: Path | None = None,
        config: Config | None = None,
        config_file: Path | None = None,
        mesh: Mapping[str, int] | None = None,
        coords: Mapping[str, int] | None = None,
        samples_unit: str = "samples",
        warmup_steps: int = 1,
        first_step: int = 0,
        record: Mapping[str, Any] | None = None,
        world: RankInfo | None = None,
        comm: Any = None,
        step_per_optimizer: bool = False,
        pace: str | None = None,
    ) -> None:
        self.run: RunDirectory | None = None
        self.attempt: Attempt | None = None
        self.phase = NullRecorder().phase
        self._environ = process_environ()
        self._given_config = config
        self._config_file = config_file
        self._given_world = world
        self._comm = comm
        self._name = name
        self._run_dir = run_dir
        self._mesh = mesh or {}
        self._coords = coords or {}
        self._samples_unit = samples_unit
        self._first_step = first_step
        self._warmup_steps = warmup_steps
        self._record = record or {}
        self._step_per_optimizer = step_per_optimizer
        self._pace = pace
        self._pacer: Pacer | None = None
        self._step_flags = StepFlag.NONE
        self._coordinator: Coordinator | None = None
        self._recording: Recording | None = None
        self._step = first_step
        self._begin_ns = 0
        self._warned: set[str] = set()
        self._has_warned_for_all = False
        self._who = ""

    @property
    def is_recording(self) -> bool:
        """Whether this rank records a trace."""
        return self._recording is not None

    def watch(self, model: Any) -> None:
        """Record the forward phases of a module, or of a stage of `torch.distributed.pipelining`."""
        if self._recording is not None:
            self._recording.phases.watch(model)

    def step(self, samples: int = 0, *, flags: StepFlag = StepFlag.NONE) -> None:
        """End a step.

        Collective in those steps in which clocks are compared: every rank calls this equally often.

        Args:
            samples: what this rank is credited with, such that the sum over the ranks is the global batch.
            flags: what marks the step as special; warm-up is added by itself.
        """
        if self._recording is None:
            return
        end_ns = time.monotonic_ns()
        flags |= self._step_flags
        if self._step < self._first_step + self._warmup_steps:
            flags |= StepFlag.WARMUP
        try:
            self._recording.end_step(self._step, self._begin_ns, end_ns, samples, flags)
            if self._pacer is not None:
                self._pacer.end_step(self._step, end_ns - self._begin_ns, flags)
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"recording ends at step {self._step}: {error or type(error).__name__}")
            self._stop(in_order=False)
        self._step += 1
        self._begin_ns = time.monotonic_ns()
        self._step_flags = StepFlag.NONE if self._pacer is None else self._pacer.begin_step()

    def pacing_point(self, name: str = "point") -> AbstractContextManager[None]:
        """Name a block that waits for all ranks, and that hpcpace cannot see: `with session.pacing_point(): ...`.

        Operations of torch.distributed are seen by themselves; this is for those of MPI, or of libraries.
        """
        num_ranks = self._world.world_size if self._world is not None else 1
        return PacedBlock(self._pacer, name, num_ranks)

    def __enter__(self) -> Session:
        try:
            self._start()
        except Exception as error:  # the boundary to somebody else's job, which goes on without us
            is_shared = isinstance(error, (WorldError, ClockSyncError))
            warn = self._warn_once_for_all if is_shared and not isinstance(error, NotEveryRank) else self._warn
            if not (isinstance(error, NotEveryRank) and error.is_told):
                warn(f"nothing is recorded: {str(error) or type(error).__name__}")
            if is_shared:
                self._coordinator = None  # the others have not come, and will not come to the end either
            self._stop(in_order=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(in_order=kind is None)
        if self._coordinator is not None and kind is None:
            self._leave_together(self._coordinator)

    def _start(self) -> None:
        problem = self._prepare()
        try:
            self._coordinator = coordinate(
                self._world,
                self._comm,
                Attendance(problem=str(problem or ""), settings=self._shared_settings()),
                timeout_s=self._config.trace.start_timeout_s,
            )
        finally:
            if problem is not None:
                raise problem
        assert self._world is not None
        deadline = Deadline(self._config.trace.start_timeout_s)
        identity = host_identity()
        host_keys = self._coordinator.allgather(identity.host_key, deadline.left_s)
        self._world = locate(self._world, host_keys)
        self._make_attempt(deadline)
        is_paced = self._config.pace.policy != NO_POLICY
        if not self._config.trace.enabled or self.attempt is None:
            if is_paced and self._world.rank == 0:
                self._warn("nobody is paced, for that needs a trace")
            return
        # Before anything that can fail on one rank alone: the others would wait for it here.
        exchange = open_exchange(self._comm, self._world.world_size, self._config.pace.timeout_s) if is_paced else None
        clock_sync = self._clock_sync(host_keys, deadline)
        if self._config.trace.snapshot:
            # Not the environment that __init__ saw: torch's group has set the interface of gloo and NCCL since.
            save_host_snapshots(
                self._coordinator,
                self._world,
                host_keys,
                process_environ(),
                self.attempt.snapshot_dir,
                warn=self._warn,
                deadline=deadline,
            )
        recording = Recording(
            path=self.attempt.trace_file(self._world.rank),
            header=self._header(identity),
            config=self._config,
            clock_sync=clock_sync,
            network=find_network_counters() if self._world.local_rank == 0 else None,
            on_optimizer_step=self.step if self._step_per_optimizer else None,
            warn=self._warn,
            warn_once_for_all=self._warn_once_for_all,
        )
        self._recording = recording
        if is_paced:
            self._pacer = open_pacer(
                self._config.pace,
                world=self._world,
                host_key=identity.host_key,
                exchange=exchange,
                recording=recording,
                first_step=self._first_step + max(self._warmup_steps, 1),
                warn=self._warn,
            )
        recording.start(self._first_step)
        self.phase = recording.recorder.phase
        self._begin_ns = time.monotonic_ns()

    def _prepare(self) -> Exception | None:
        """Find out settings and place, and return why that cannot be; the other ranks want to know that, too."""
        self._config, self._world = Config(), self._given_world
        try:
            self._config = self._given_config or load_config(file=self._config_file, environ=self._environ)
            if self._pace is not None:
                self._config = replace(self._config, pace=replace(self._config.pace, policy=self._pace))
            self._world = self._given_world or rank_info(self._environ)
        except Exception as error:  # the boundary to somebody else's job, whose other ranks wait for our answer
            return error
        finally:
            self._who = f"rank {self._world.rank}: " if self._world is not None else ""
        return None

    def _shared_settings(self) -> dict[str, Any]:
        """Return the settings that decide which messages ranks exchange."""
        return {
            "trace.enabled": self._config.trace.enabled,
            "trace.snapshot": self._config.trace.snapshot,
            "clock.enabled": self._config.clock.enabled,
            "clock.num_pings": self._config.clock.num_pings,
            "pace.policy": self._config.pace.policy,
        }

    def _stop(self, *, in_order: bool) -> None:
        recording, self._recording = self._recording, None
        self.phase = NullRecorder().phase
        if recording is None:
            return
        self._end_pacing(in_order=in_order)
        try:
            recording.close(in_order=in_order)
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"the trace may lack its end: {error or type(error).__name__}")

    def _end_pacing(self, *, in_order: bool) -> None:
        pacer, self._pacer = self._pacer, None
        if pacer is None or self.attempt is None or self._world is None:
            return
        try:
            close_pacer(pacer, self.attempt, self._world.rank, in_order=in_order, warn=self._warn)
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"what came of pacing is not known: {error or type(error).__name__}")

    def _leave_together(self, coordinator: Coordinator) -> None:
        """Wait for the other ranks, though not for ever, so that rank 0 may read every trace from here on."""
        try:
            with closing(coordinator):
                coordinator.meet(self._config.clock.timeout_s)
            self._coordinator = None
        except Exception as error:  # the job may have ended torch's process group already: no reason to fail it
            self._warn_once_for_all(f"the ranks did not leave the session together: {error}")

    def _make_attempt(self, deadline: Deadline) -> None:
        """Let rank 0 make the folder of this start, and tell the others where it is, or why there is none."""
        assert self._coordinator is not None and self._world is not None
        world = self._world
        hosts = self._coordinator.allgather(
            {"rank": world.rank, "host": world.host, "node": world.node}, deadline.left_s
        )
        made = {"path": "", "problem": ""}
        if world.rank == 0:
            run = RunDirectory(self._run_dir or default_run_path(self._name, self._environ))
            try:
                # A file system that hangs must not keep the job from training.
                path = in_time(partial(self._new_attempt, run, hosts), deadline.left_s / 2, "its file system")
                made["path"] = str(path)
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                made["problem"] = f"cannot make the run directory {run.path}: {reason}"
        made = self._coordinator.allgather(made, deadline.left_s)[0]
        if made["problem"]:
            if world.rank == 0:
                self._warn(f"nothing is recorded: {made['problem']}; name another one")
            return
        self.attempt = Attempt(Path(made["path"]))
        self.run = RunDirectory(self.attempt.path.parent)

    def _new_attempt(self, run: RunDirectory, hosts: list[Mapping[str, Any]]) -> Path:
        made = RunDirectory(run.path.absolute()).new_attempt()
        made.write_json(made.run_json, self._facts(hosts))
        return made.path

    def _facts(self, hosts: list[Mapping[str, Any]]) -> dict[str, Any]:
        assert self._coordinator is not None and self._world is not None
        facts = {
            "launcher": self._world.launcher,
            "world_size": self._world.world_size,
            "mesh": dict(self._mesh),
            "samples_unit": self._samples_unit,
            "coordinated_over": self._coordinator.name,
            **self._record,
        }
        return run_record(name=self._name, config=self._config, environ=self._environ, hosts=hosts, facts=facts)

    def _header(self, identity: HostIdentity) -> TraceHeader:
        assert self.run is not None and self.attempt is not None and self._world is not None
        world, counters = self._world, find_network_counters()
        return TraceHeader(
            run_id=self.run.path.name,
            attempt=self.attempt.number,
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            local_size=world.local_size,
            node=world.node,
            host=identity.host,
            topology_addr=world.topology_addr,
            job_id=world.job_id,
            boot_id=identity.boot_id,
            host_key=identity.host_key,
            mesh=",".join(f"{name}={size}" for name, size in self._mesh.items()),
            dp=self._coords.get("dp", -1),
            pp=self._coords.get("pp", -1),
            tp=self._coords.get("tp", -1),
            samples_unit=self._samples_unit,
            interfaces=counters.interfaces,
            created_unix_ns=time.time_ns(),
            hpcpace_version=__version__,
        )

    def _clock_sync(self, host_keys: list[str], deadline: Deadline) -> ClockSync | None:
        assert self._coordinator is not None and self._world is not None
        settings = self._config.clock
        if not settings.enabled:
            return None
        return ClockSync(
            self._coordinator.transport(deadline.left_s),
            self._world.rank,
            host_keys,
            num_pings=settings.num_pings,
            interval_s=settings.interval_s,
            timeout_s=settings.timeout_s,
        )

    def _warn_once_for_all(self, message: str) -> None:
        """Warn of what all ranks meet alike, on two of them, one of which may be the dead one; the first time only."""
        if not self._has_warned_for_all and (self._world is None or self._world.rank <= 1):
            self._warn(message)
        self._has_warned_for_all = True

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            message = Redaction.of(self._environ, sys.argv).text(message)
            print(f"hpcpace: {self._who}warning: {message}", file=sys.stderr, flush=True)


session = Session
