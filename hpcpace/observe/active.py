"""A session while it records: the steps of one rank, its recording and its pacing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hpcpace.core.environment import RankInfo, process_environ
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.observe.alarm import PAUSE_S, Alarm
from hpcpace.observe.ends import EndEvent
from hpcpace.observe.exchange import open_exchange
from hpcpace.observe.host_snapshot import save_host_snapshots
from hpcpace.observe.joined import JoinedRank
from hpcpace.observe.network import find_network_counters
from hpcpace.observe.pacing import PacedBlock, close_pacer, open_pacer
from hpcpace.observe.recording import Recording
from hpcpace.observe.session_settings import SessionSettings
from hpcpace.observe.steps import StepFinder
from hpcpace.observe.switching import OrderSources, find_switching
from hpcpace.observe.telling import Telling
from hpcpace.observe.warner import Warner
from hpcpace.observe.watchdog import Watchdog
from hpcpace.pace.pacer import Pacer
from hpcpace.pace.settings import NO_POLICY
from hpcpace.trace.schema import Phase, StepFlag


class ActiveSession:
    """Records one rank and paces it, from `start` to `close`.

    Args:
        settings: of the session.
        world: this rank's place.
        attempt: the folder of this attempt.
        recording: not started yet.
        pacer: None where the job is not paced.
        orders: switch the level of detail; None where nothing does.
        watchdog: None where no step is watched.
        telling: tells the centre of this rank; None where that is not asked for.
        warn: takes a warning.

    Attributes:
        step: number of the step that is running.
        recording: what observes the job and writes the trace.
        watchdog: notices steps that last too long.
    """

    def __init__(
        self,
        *,
        settings: SessionSettings,
        world: RankInfo,
        attempt: Attempt,
        recording: Recording,
        pacer: Pacer | None,
        orders: OrderSources | None = None,
        watchdog: Watchdog | None,
        telling: Telling | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self.step = settings.first_step
        self.recording = recording
        self.watchdog = watchdog
        self._settings, self._world, self._attempt = settings, world, attempt
        self._pacer, self._orders, self._warn = pacer, orders, warn
        self._telling = telling
        self._step_flags = StepFlag.NONE
        self._begin_ns = 0

    def start(self) -> None:
        """Start to record. Collective: the clocks are compared for the first time."""
        self.recording.start(self._settings.first_step)
        if self._orders is not None:
            self._orders.start()
        if self._telling is not None:
            self._telling.start()
        self._begin_ns = self.recording.now()
        if self.watchdog is not None:
            self.watchdog.start()

    def end_step(self, end_ns: int, samples: int, flags: StepFlag) -> None:
        """End the step that is running. Collective in those steps in which the clocks are compared.

        Args:
            end_ns: when it ended.
            samples, flags: see `Session.step`.
        """
        flags |= self._step_flags
        if self.step < self._settings.first_counted_step:
            flags |= StepFlag.WARMUP
        self.recording.end_step(self.step, self._begin_ns, end_ns, samples, flags)
        if self._telling is not None:
            self._telling.end_step(self._begin_ns, end_ns, samples)
        if self._pacer is not None:
            self._pacer.end_step(self.step, end_ns - self._begin_ns, flags)

    def begin_step(self, begin_ns: int = 0) -> None:
        """Start the next step, now or at another time; its detail is switched only now."""
        self.step += 1
        if not begin_ns:
            self.recording.begin_step(self.step)
        self._begin_ns = begin_ns or self.recording.now()
        self._step_flags = StepFlag.NONE if self._pacer is None else self._pacer.begin_step()

    def recorded(self) -> dict[str, Any]:
        """Return what was recorded, see `Session.recorded`; complete once the session is closed."""
        steps = self.recording.steps
        return {
            "steps": self.step - self._settings.first_step,
            "steps_from": "named by the script" if steps is None else steps.source.evidence,
            "phases": [phase.name.lower() for phase in Phase if phase in self.recording.recorder.phases_seen],
        }

    def paced_block(self, name: str) -> AbstractContextManager[None] | None:
        """Return the block of `Session.pacing_point`; None where the job is not paced."""
        return None if self._pacer is None else PacedBlock(self._pacer, name, self._world.world_size)

    def close(self, *, in_order: bool, end: EndEvent | None = None) -> None:
        """End pacing and recording; what fails is a warning. Collective if `in_order`.

        Args:
            in_order: whether all ranks end here, none by an error.
            end: how the program of this rank ends, if that is to be recorded.
        """
        if self._orders is not None:
            self._orders.stop()
        if self.watchdog is not None:
            self.watchdog.stop(by_error=not in_order)
        if end is not None:
            self.recording.add_end(end)
        if self._pacer is not None:
            try:
                close_pacer(self._pacer, self._attempt, self._world.rank, in_order=in_order, warn=self._warn)
            except Exception as error:  # the boundary to somebody else's job
                self._warn(f"the result of pacing is lost: {error or type(error).__name__}")
        try:
            self.recording.finish_steps(in_order=in_order)
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"the last steps may be missing: {error or type(error).__name__}")
        try:
            self.recording.close(in_order=in_order)
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"the trace may lack its end: {error or type(error).__name__}")
        if self._telling is not None:
            try:
                self._telling.close()
            except Exception as error:  # the boundary to somebody else's job
                self._warn(f"the centre is not told of the end: {error or type(error).__name__}")


def open_session(joined: JoinedRank, attempt: Attempt, warner: Warner, *, steps: StepFinder | None) -> ActiveSession:
    """Return a session that is ready to start. Collective: every rank calls this.

    Args:
        joined: this rank, with a trace enabled.
        attempt: the folder of this attempt.
        warner: warns the user.
        steps: finds steps; None if the job says itself where they end.
    """
    config, world = joined.config, joined.world
    is_paced = config.pace.policy != NO_POLICY
    # Before anything that can fail on one rank alone: the others would wait for it here.
    exchange = open_exchange(joined.settings.comm, world.world_size, config.pace.timeout_s) if is_paced else None
    clock_sync = joined.make_clock_sync()
    if config.trace.snapshot:
        # Not the environment in the settings: since then torch's group has set the interface of gloo and NCCL.
        save_host_snapshots(
            joined.coordinator,
            world,
            joined.host_keys,
            process_environ(),
            attempt.snapshot_dir,
            warn=warner.warn,
            deadline=joined.deadline,
        )
    # What it warns of, all ranks find alike.
    switching = find_switching(config, warn=warner.warn if world.rank == 0 else lambda message: None)
    recording = Recording(
        path=attempt.trace_file(world.rank),
        header=joined.make_header(attempt),
        config=config,
        clock_sync=clock_sync,
        network=find_network_counters() if world.local_rank == 0 else None,
        steps=steps,
        switching=switching,
        warn=warner.warn,
        warn_once_for_all=warner.warn_once_for_all,
    )
    orders = None
    if clock_sync is not None and not is_paced:  # the ranks hear of orders as they compare their clocks
        run = RunDirectory(attempt.path.parent)
        name = config.trace.switch_signal
        orders = OrderSources(switching, run, rank=world.rank, signal_name=name, warn=warner.warn)
    pacer = None
    if is_paced:
        pacer = open_pacer(
            config.pace,
            world=world,
            host_key=joined.identity.host_key,
            exchange=exchange,
            recording=recording,
            first_step=max(joined.settings.first_counted_step, joined.settings.first_step + 1),
            warn=warner.warn,
        )
    return ActiveSession(
        settings=joined.settings,
        world=world,
        attempt=attempt,
        recording=recording,
        pacer=pacer,
        orders=orders,
        watchdog=_watchdog(joined, attempt, recording, warner),
        telling=_telling(joined, attempt, recording, warner),
        warn=warner.warn,
    )


def _telling(joined: JoinedRank, attempt: Attempt, recording: Recording, warner: Warner) -> Telling | None:
    asked = joined.config.metrics
    if asked.prometheus is None and not asked.job_comment:
        return None
    return Telling(
        asked,
        world=joined.world,
        host=joined.identity.host,
        attempt=attempt,
        recording=recording,
        warn=warner.warn,
    )


def _watchdog(joined: JoinedRank, attempt: Attempt, recording: Recording, warner: Warner) -> Watchdog | None:
    settings, rank = joined.config.hang, joined.world.rank
    if settings.on_hang == "off":
        return None
    return Watchdog(
        rank=rank,
        identity=joined.identity,
        attempt=attempt,
        settings=settings,
        watched=recording,
        alarm=Alarm(
            attempt,
            rank,
            num_ranks=joined.world.world_size,
            stops=settings.on_hang == "stop",
            tell=warner.tell,
            pause_s=min(PAUSE_S, settings.least_s),
        ),
        warn=warner.warn,
    )
