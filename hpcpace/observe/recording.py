"""Everything that runs while a rank records, started and stopped in order: what observes, what paces, what exports."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.core.compat import keep_uncompiled
from hpcpace.core.config import NO_POLICY, Config
from hpcpace.core.detail import Detail
from hpcpace.core.environment import RankInfo, process_environ, process_redaction
from hpcpace.core.files import Folder
from hpcpace.core.rundir import NUM_OURS_OF_TRACES, Attempt, RunDirectory
from hpcpace.core.text import plural
from hpcpace.observe.alarm import Alarm
from hpcpace.observe.clock_thread import ClockThread
from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver, SwitchedCollectives, find_layer
from hpcpace.observe.collectives.operations import GroupNumbers
from hpcpace.observe.device.layer import DeviceLayer, find_device
from hpcpace.observe.ends import (
    AbortTrap,
    EndEvent,
    StderrTail,
    TerminationTrap,
    end_by,
    end_by_signal,
    error_text,
    pieces_of,
    places_of,
    termination_held,
)
from hpcpace.observe.exporters import Exporters, MeasureParts, StepFigures
from hpcpace.observe.guest import Warner
from hpcpace.observe.hang_snapshot import Operations, operations, training_stack
from hpcpace.observe.host.connections import FlowSampler, OwnConnections
from hpcpace.observe.host.counters import HostCounters, gpu_in_use
from hpcpace.observe.host.network import NetworkCounters, find_network_counters
from hpcpace.observe.host.phase_cores import PhaseCores
from hpcpace.observe.joined import JoinedRank, save_host_snapshots
from hpcpace.observe.node_local import place_on_node
from hpcpace.observe.pacing import Pacer
from hpcpace.observe.phases import PhaseObserver
from hpcpace.observe.settings import ClockConfig, HangConfig, MetricsConfig, TraceConfig
from hpcpace.observe.steps import StepFinder
from hpcpace.observe.switching import NO_SIGNAL, OrderFile, OrderSignal, find_switching
from hpcpace.observe.update_patterns import StepSource
from hpcpace.observe.watchdog import Look, Watchdog
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, NUMBER_BITS, TABLES, ErrorPart, EventKind, Phase, StepFlag, TraceHeader
from hpcpace.world.clock import ClockSync

NAMED = "named by the script"
_FIRST_FLUSH_TIMEOUT_S = 5.0
# A disk that hangs must not cost the seconds that Slurm leaves between SIGTERM and SIGKILL (KillWait, 30 by default).
_RESCUE_TIMEOUT_S = 3.0
_RESCUE_COPY_TIMEOUT_S = 20.0
# Where these are in a row of `host`, behind its time.
_RSS, _GPU_MEMORY = ((TABLES["host"].dtype.names or ()).index(name) - 1 for name in ("rss_bytes", "gpu_memory_bytes"))
_EVENT_BYTES = TABLES["events"].dtype["text"].itemsize


class Recording:
    """Records one rank and paces it, from `start` to `close`. Collective: every rank makes one.

    Args:
        joined: this rank, with a trace enabled.
        attempt: the folder of this attempt.
        warner: warns the user.
        steps: finds steps; None if the job says itself where they end.
        make_pacer: makes the pacer; None where the job is not paced.
        measure_parts: divides steps into parts for `figures`; None where nobody can ask for them.

    Attributes:
        step: number of the step that is running.
        steps: finds steps, as the argument, until the job says where they end.
        takes_names: whether a session inside this one may say where steps end.
        clocks: compares the clocks; None where that is switched off.
        now: the clock of what happens in the training: that of the host, and on ranks with a device a mark there, too.
        recorder: takes the rows.
        phases: observes phases.
        watchdog: notices steps that last too long; None where no step is watched.
        figures: makes the figures of the last steps; None without `measure_parts`.
    """

    def __init__(
        self,
        joined: JoinedRank,
        attempt: Attempt,
        warner: Warner,
        *,
        steps: StepFinder | None = None,
        make_pacer: Callable[[Recording], Pacer] | None = None,
        measure_parts: MeasureParts | None = None,
    ) -> None:
        config, world, settings = joined.config, joined.world, joined.settings
        self.step = self._first_step = settings.first_step
        self._first_counted_step = settings.first_step + settings.warmup_steps
        self._warner, self._num_ranks = warner, world.world_size
        trace = config.of(TraceConfig)
        self._copy_timeout_s = trace.copy_timeout_s
        self._stderr_tail = StderrTail() if trace.error_text else None
        self._begin_ns = self._num_ended = 0
        self._training_thread, self._step_flags = threading.get_ident(), StepFlag.NONE
        sync = joined.make_clock_sync()
        if trace.snapshot:
            # Not the environment in the settings: since then torch's group has set the interface of gloo and NCCL.
            save_host_snapshots(joined, process_environ(), attempt.snapshot_dir, warn=warner.warn)
        # What it warns of, all ranks find alike.
        self._switching = find_switching(config, warn=warner.warn if world.rank == 0 else lambda message: None)
        self._trap, self._cleanup = TerminationTrap(self.rescue), ExitStack()
        clock = find_device(warner.warn)
        self._device = None if clock is None else DeviceLayer(clock)
        self.now, self._phase_cores = self._own_clock(config)
        path, header = attempt.trace_file(world.rank), joined.make_header(attempt)
        self._local = place_on_node(trace.trace_dir, header, path, warn=warner.warn)
        self.recorder = self._new_recorder(config, header, path)
        self.figures = None if measure_parts is None else StepFigures(self.recorder, measure_parts)
        if self._device is not None:
            self._device.record_into(self.recorder)
        self.recorder.phase_ended = None if self._phase_cores is None else self._phase_cores.ended
        self.recorder.keeps = self._switching.keeps
        self.clocks = None if sync is None else self._new_clocks(sync, config.of(ClockConfig), is_meant=steps is None)
        self._groups = GroupNumbers(self.recorder)
        self._collectives = SwitchedCollectives(partial(self._new_observer, config))
        self.recorder.open_collectives = self._collectives.open_collectives
        self.steps, self.takes_names = steps, steps is not None and steps.is_auto
        self.phases = PhaseObserver(
            self.recorder,
            has_open_collectives=lambda: self._collectives.has_open,
            steps=steps,
            warn=warner.warn,
            take_last_ranks=lambda: self._collectives.current.take_last_ranks(),
            now=self.now,
            ended=self.recorder.phase_ended,
        )
        self._host = HostCounters(warn=warner.warn, phases=self._phase_cores)
        self._counters = self._new_counters(config, world) if trace.counters else None
        self._seeks_gpu = self._device is not None and trace.counters
        self._find_gpu()
        self._orders: list[OrderFile | OrderSignal] = []
        if self.clocks is not None and make_pacer is None:  # ranks hear of orders as they compare their clocks
            self._orders = self._order_sources(trace.switch_signal, attempt, is_first=world.rank == 0)
        self._pacer: Pacer | None = None if make_pacer is None else make_pacer(self)
        if self._pacer is not None:
            self._pace_by(self._pacer)
        self.watchdog = self._new_watchdog(joined, attempt) if config.of(HangConfig).on_hang != "off" else None
        self._exporters = self._new_exporters(joined, attempt)

    def _own_clock(self, config: Config) -> tuple[Callable[[], int], PhaseCores | None]:
        """Return the clock of what happens in the training, and what it reads of cores; None where it reads nothing."""
        if self._device is not None:  # what such a rank does takes no time of its core
            return self._device.marks.now, None
        cores = PhaseCores() if config.of(TraceConfig).counters else None
        return (time.monotonic_ns if cores is None else cores.now), cores

    def _new_clocks(self, sync: ClockSync, settings: ClockConfig, *, is_meant: bool) -> ClockThread:
        return ClockThread(
            sync,
            add=lambda sample: self.recorder.add_clock(*sample),
            notice=lambda: self._switching.notice,
            warn=self._warner.warn_once_for_all,
            leave_timeout_s=settings.leave_timeout_s(is_meant=is_meant),
            leaves_together=is_meant,
        )

    def _new_recorder(self, config: Config, header: TraceHeader, path: Path) -> Recorder:
        open_folder = partial(Folder.open, path.parent, make=True, num_ours=NUM_OURS_OF_TRACES)
        return Recorder(
            path if self._local is None else self._local.path,
            header,
            flush_interval_s=config.of(TraceConfig).flush_interval_s,
            max_rows=config.of(TraceConfig).max_rows,
            warn=self._warner.warn,
            mark=self.now,
            device_tables=() if self._device is None else DEVICE_TABLES,
            open_folder=open_folder if self._local is None else self._local.open_folder,
            keep_last=config.of(TraceConfig).keep_last,
        )

    def _new_counters(self, config: Config, world: RankInfo) -> CounterThread:
        most = config.of(TraceConfig).flows
        flows = FlowSampler(self.recorder, OwnConnections().read, most=most) if most else None
        network = find_network_counters() if world.local_rank == 0 else None
        counters = CounterThread(self.recorder, self._host, network, flows, warn=self._warner.warn)
        counters.figures = self.figures
        return counters

    def _order_sources(self, signal_name: str, attempt: Attempt, *, is_first: bool) -> list[OrderFile | OrderSignal]:
        """Return where orders come from: the file on rank 0, and the signal on all ranks."""
        found: list[OrderFile | OrderSignal] = []
        if is_first:
            run = RunDirectory(attempt.path.parent)
            found.append(OrderFile(run, give=self._switching.give, warn=self._warner.warn))
        if signal_name != NO_SIGNAL:
            toggle = self._switching.toggle if is_first else None
            found.append(OrderSignal(signal_name, toggle, warn=self._warner.warn))
        return found

    def _new_exporters(self, joined: JoinedRank, attempt: Attempt) -> Exporters | None:
        config, world, host = joined.config.of(MetricsConfig), joined.world, joined.identity.host
        if config.prometheus is None and not config.job_comment:
            return None
        return Exporters(config, world=world, host=host, attempt=attempt, recording=self, warn=self._warner.warn)

    def _new_watchdog(self, joined: JoinedRank, attempt: Attempt) -> Watchdog:
        world, settings = joined.world, joined.config.of(HangConfig)
        return Watchdog(
            rank=world.rank,
            identity=joined.identity,
            attempt=attempt,
            settings=settings,
            watched=self,
            alarm=Alarm.of(attempt, world, settings, tell=self._warner.tell),
            warn=self._warner.warn,
        )

    def start(self) -> None:
        """Start to record. Collective: the clocks are compared for the first time."""
        self.recorder.start()
        # The file exists from the first step on, even if the rank dies within its first second.
        self.recorder.flush(_FIRST_FLUSH_TIMEOUT_S)
        for trap in (self._trap, AbortTrap(partial(self.rescue, end_by_signal(signal.SIGABRT)))):
            if trap.install():
                self._cleanup.callback(trap.remove)
        if self._counters is not None:
            self._counters.start()
        if self.clocks is not None:
            self.clocks.start(self.step)
        self.recorder.step = self.step
        keep_uncompiled()
        self._switching.live = self._switching.plan.at(self.step)
        if not self._switching.plan.is_always_full:
            self._add_event(EventKind.SWITCH, self._switching.live, self._switching.why)
        if self._stderr_tail is not None and self._stderr_tail.name and self._num_ranks > 1:
            self._add_event(EventKind.ERROR_TEXT, ErrorPart.STDERR_FILE, self._stderr_tail.name)
        if self._switching.live >= Detail.COLLECTIVES:
            self._collectives.switch_on(0)
        if self._observes_phases:
            self.phases.install()
        if self._device is not None:
            self._device.start(self._cleanup)
        for source in self._orders:
            source.start()
        if self._exporters is not None:
            self._exporters.start()
        self._begin_ns = self.now()
        if self.watchdog is not None:
            self.watchdog.start()

    def _pace_by(self, pacer: Pacer) -> None:
        assert isinstance(self._collectives.current, CollectiveObserver)
        self._collectives.current.pacer = self.phases.backward.pacer = pacer
        pacer.start()

    def add_delay(self, begin_ns: int, end_ns: int) -> None:
        """Record a delay in the current step."""
        self.recorder.add_phase(self.recorder.step, Phase.PACE, begin_ns, end_ns, -1)

    def add_pacing(self, *row: int) -> None:
        """Record a row of the `pacing` table."""
        self.recorder.add_pacing(*row)

    def end_step(self, end_ns: int, samples: int, flags: StepFlag) -> None:
        """End the step that is running; no other rank is waited for.

        Args:
            end_ns: when it ended.
            samples, flags: see `Session.step`.
        """
        step, begin_ns = self.step, self._begin_ns
        if self._phase_cores is not None:
            self._phase_cores.end_step()
        if self._step_flags:
            flags |= self._step_flags
        if step < self._first_counted_step:
            flags |= StepFlag.WARMUP
        self._record_step(step, begin_ns, end_ns, samples, flags)
        self._num_ended += 1
        if self._seeks_gpu:
            self._find_gpu()
        if self._device is not None:
            self._device.end_step(self._num_ended, is_shared=self.clocks is not None)
        self.recorder.step = step + 1
        if self.clocks is not None and (notice := self.clocks.begins(step + 1, end_ns - begin_ns)) is not None:
            self._act_together(notice, step + 1)
        if self._exporters is not None:
            self._exporters.end_step(begin_ns, end_ns, samples)
        if self._pacer is not None:
            self._pacer.end_step(step, end_ns - begin_ns, flags)

    def _act_together(self, notice: tuple[int, ...], step: int) -> None:
        """Do before a step what every rank does before it: a rank that waits for its device holds the others up."""
        if self._device is not None:
            self._device.anchor()
        self._switching.hear(notice, step)

    def _record_step(self, step: int, begin_ns: int, end_ns: int, samples: int, flags: StepFlag) -> None:
        # Less than the plan says where steps are found only after they have ended.
        detail = min(self._switching.plan.at(step), self._switching.live)
        if detail < Detail.FULL:
            # A warm-up without phases needs no mark of its own.
            is_plain = detail == Detail.STEPS or flags & StepFlag.WARMUP
            flags |= StepFlag.WARMUP | (StepFlag.PLAIN if is_plain else StepFlag.UNPHASED)
        self.recorder.add_step(step, begin_ns, end_ns, samples, flags)
        self._collectives.end_step(step)

    def begin_step(self, begin_ns: int = 0) -> None:
        """Start the next step, now or at another time; its detail is switched only now."""
        self.step += 1
        if not begin_ns:
            self._switch_detail()
        self._begin_ns = begin_ns or self.now()
        if self._phase_cores is not None and self._observes_phases:
            self._phase_cores.begin_step()
        self._step_flags = StepFlag.NONE if self._pacer is None else self._pacer.begin_step()

    def _switch_detail(self) -> None:
        """Switch to the detail of the step that begins now, between two operations that are the same on all ranks."""
        detail, before = self._switching.plan.at(self.step), self._switching.live
        if detail == before:
            return
        had_phases = self._observes_phases
        self._switching.live = detail
        if before >= Detail.COLLECTIVES > detail:
            self._collectives.switch_off()
        elif detail >= Detail.COLLECTIVES > before:
            # Ranks that begin with the same step number the same operations alike; others have other numbers.
            self._collectives.switch_on(self.step << NUMBER_BITS)
        if had_phases and not self._observes_phases:
            self.phases.uninstall()
        elif self._observes_phases and not had_phases:
            self.phases.install()
        keep_uncompiled()
        self._add_event(EventKind.SWITCH, self._switching.live, self._switching.why)

    @property
    def _observes_phases(self) -> bool:
        """Whether phases are seen: without them, steps could not be found either."""
        return self._switching.live == Detail.FULL or self.steps is not None

    @contextmanager
    def paced_block(self, name: str) -> Iterator[None]:
        """Pace a block of the job's own, in which all ranks wait for each other."""
        arrival = None if self._pacer is None else self._pacer.arrive(name)
        yield
        if self._pacer is not None:
            self._pacer.leave(arrival, tuple(range(self._num_ranks)))

    def _find_gpu(self) -> None:
        """Have the counters of this rank's GPU read once this thread uses one: each has a current device of its own."""
        gpu = gpu_in_use() if self._seeks_gpu else None
        if gpu is not None:
            self._host.use_gpu(gpu)
            self._seeks_gpu = False

    def number_rows(self, step: int) -> None:
        """Give a step number to all rows from here on."""
        self._collectives.end_step(step - 1)
        self.recorder.step = step

    def settle_steps(self, numbers: Mapping[int, int], step: int) -> None:
        """Change the step numbers of rows that are kept in memory, and go on with `step`."""
        self.number_rows(step)
        self.recorder.settle_steps(numbers)

    def await_names(self, is_awaited: bool = True) -> None:
        """Find no step for now, where the job is about to say where they end; or go on."""
        if self.steps is not None:
            self.steps.await_names(is_awaited)

    def name_steps(self) -> None:
        """Let the job say from here on where steps end; none is found any more."""
        steps, self.steps, self.phases.steps = self.steps, None, None
        if steps is not None:
            self._step_flags |= steps.give_up()
            self._add_event(EventKind.STEP_SOURCE, 0, f"{plural(self.step, 'step')} by session.step(): {NAMED}")

    def add_step_source(self, source: StepSource) -> None:
        """Record how steps are found."""
        self._add_event(EventKind.STEP_SOURCE, source.num_irregular, str(source))

    def _add_event(self, kind: EventKind, code: int, text: str) -> None:
        self._add_end((kind, code, text.encode()[:_EVENT_BYTES]))

    def _add_end(self, *events: EndEvent) -> None:
        """Record how a program ends, and what is known of that, at one time."""
        now_ns = time.monotonic_ns()
        for event in events:
            self.recorder.add_event(now_ns, self.recorder.step, *event)

    def _said_of(self, end: EndEvent, error: BaseException | None = None) -> list[EndEvent]:
        """Return what is known of an end by an error or a signal, as far as it may be recorded."""
        said: list[EndEvent] = []
        tail = self._stderr_tail
        if tail is None:
            return said
        if error is not None:
            self._end(lambda: said.extend(error_text(error)), "the message of the error is not recorded")
        if end[0] is EventKind.SIGNAL:
            said += places_of(training_stack(self._training_thread))
        if end[:2] != (EventKind.EXIT, 0):
            with suppress(OSError):  # it may be none that can be read
                said += pieces_of(ErrorPart.STDERR, tail.last_lines(process_redaction()))
        return said

    def recorded(self) -> dict[str, Any]:
        """Return what was recorded, see `Session.recorded`; complete once the recording is closed."""
        return {
            "steps": self.step - self._first_step,
            "steps_from": NAMED if self.steps is None else self.steps.source.words,
            "phases": [phase.name.lower() for phase in Phase if phase in self.recorder.phases_seen],
            "collectives_by": self._collectives.layer,
        }

    def close(self, *, in_order: bool, error: BaseException | None = None) -> None:
        """End pacing and recording; what fails is a warning. Collective if `in_order`.

        Args:
            in_order: whether all ranks end here, none by an error; the clocks are compared for the last time then.
            error: what ends the program of this rank, if anything does.
        """
        for source in self._orders:
            source.stop()
        if self.watchdog is not None:
            self.watchdog.stop(by_error=not in_order)
        if error is not None and (end := end_by(error)) is not None:
            self._add_end(end, *self._said_of(end, error))
        if self._pacer is not None:
            self._end(partial(self._pacer.close, in_order=in_order), "the result of pacing is lost")
        self._end(self._finish_steps, "the last steps may be missing")
        self._end(partial(self._close_trace, in_order), "the trace may lack its end")
        if self._exporters is not None:
            self._end(self._exporters.close, "the centre is not told of the end")

    def _end(self, part: Callable[[], object], loss: str) -> None:
        try:
            part()
        except Exception as error:  # the boundary to somebody else's job
            self._warner.warn(f"{loss}: {error or type(error).__name__}")

    def _finish_steps(self) -> None:
        """Decide on the last steps and record how steps, phases and samples were found."""
        if self.steps is not None:
            self.steps.finish()
            if self.phases.samples.source:
                self._add_event(EventKind.SAMPLES_SOURCE, 1, self.phases.samples.source)
        self._add_event(EventKind.PHASE_SOURCE, len(self.phases.seen), self.phases.source)

    def _close_trace(self, in_order: bool) -> None:
        """End every part, whatever another one raises; the last error is raised again."""
        with ExitStack() as parts:  # which end in the opposite order
            parts.callback(self._end_file)
            if self._counters is not None:
                parts.callback(self._counters.stop)
            parts.callback(self._collectives.uninstall)
            if self._phase_cores is not None:
                parts.callback(self._phase_cores.close)
            if self._device is not None:
                parts.callback(self._end_device, self._device, in_order)
            if self.clocks is not None:
                parts.callback(self.clocks.close, in_order=in_order)
            parts.callback(self.phases.uninstall)

    def _end_device(self, device: DeviceLayer, in_order: bool) -> None:
        self._add_event(EventKind.DEVICE_SOURCE, *device.end(in_order=in_order))

    def _end_file(self) -> None:
        with self._cleanup:
            is_written = self.recorder.close()
        # Of a disk that hangs, the recorder has said so.
        if self._local is not None and is_written:
            with termination_held():
                self._local.come_home(self._copy_timeout_s, is_last=True, warn=self._warner.warn)

    def _new_observer(self, config: Config, first_number: int) -> CollectiveObserver | CompiledObserver:
        may_be_compiled = config["pace.policy"] == NO_POLICY and self._device is None
        layer = find_layer() if may_be_compiled and config.of(TraceConfig).compiled else None
        shared: dict[str, Any] = {"warn": self._warner.warn, "groups": self._groups, "first_number": first_number}
        if layer is not None:
            return CompiledObserver(layer, self.recorder, **shared)
        device_times = None if self._device is None else self._device.times
        return CollectiveObserver(self.recorder, device_times=device_times, **shared)

    def seen(self) -> Look:
        """Return what shows whether this rank moves; safe in any thread, and cheap."""
        regions = self.recorder.regions_under_way()
        named = next((region for region in regions if region[0] in (Phase.CHECKPOINT, Phase.EVAL)), None)
        return Look(
            step=self.recorder.step,
            num_moves=sum(number for *_, number in self._collectives.current.entered()) + self.phases.num_ended,
            under_way=named or self.phases.under_way or next(iter(regions), None),
            phases_before=self.recorder.phases_seen,
            sees_phases=self._observes_phases,
        )

    def operations(self, rank: int) -> Operations:
        """Return the operations of this rank, for a notice; safe in any thread."""
        return operations(
            rank,
            groups=self._groups.named,
            rows=self._collectives.open_collectives(),
            entered=self._collectives.current.entered(),
            is_complete=self._collectives.is_complete,
        )

    def rescue(self, end: EndEvent | None = None) -> None:
        """Bring to disk what is in memory, and record how the program ends: it does so without closing the trace.

        Args:
            end: how it ends; None for SIGTERM, which may be no end where the job has a handler of its own.
        """
        is_last = end is not None or self._trap.is_decisive
        end = end or end_by_signal(signal.SIGTERM)
        self._add_end(end, *self._said_of(end))
        self.recorder.settle_steps()
        if self._device is not None:
            self._device.marks.resolve()
        self.recorder.awaits_device = False
        self.recorder.flush(_RESCUE_TIMEOUT_S)
        self.recorder.awaits_device = True
        with self.recorder.held(_RESCUE_TIMEOUT_S) as is_held:
            if is_last:  # else what has been recorded since the flush is written later
                self.recorder.tell_losses()
            if self._local is not None and is_held:
                timeout_s = min(self._copy_timeout_s, _RESCUE_COPY_TIMEOUT_S)
                self._local.come_home(timeout_s, is_last=is_last, warn=self._warner.warn)


_SAMPLE_INTERVAL_S = 1.0


class CounterThread:
    """Samples until stopped; a counter that fails ends the sampling with one warning, never the job.

    Args:
        network: counters of the host, None on ranks that do not record them.
        flows: records the connections of this process, None if they are not recorded.

    Attributes:
        figures: gets the memory of this process; None if nobody asks.
    """

    def __init__(
        self,
        recorder: Recorder,
        host: HostCounters,
        network: NetworkCounters | None,
        flows: FlowSampler | None = None,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._recorder, self._warn = recorder, warn
        self._host, self._network, self._flows = host, network, flows
        self.figures: StepFigures | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcpace-counters", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stopped.set()
        self._thread.join(timeout=2 * _SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """Record one row of each table, and of each connection that is due."""
        now_ns = time.monotonic_ns()
        row = self._host.read()
        self._recorder.add_host(now_ns, *row)
        if self.figures is not None:
            self.figures.memory_bytes = row[_RSS], row[_GPU_MEMORY]
        for quota in self._host.throttling.take_new():
            file = quota.file.encode(errors="replace")[-_EVENT_BYTES:]
            self._recorder.add_event(now_ns, self._recorder.step, EventKind.CPU_QUOTA, quota.millicores, file)
        if self._network is not None:
            for row in self._network.read():
                self._recorder.add_network(now_ns, *row)
        self._sample_flows()

    def _sample_flows(self) -> None:
        """Record connections; where that fails, everything else goes on."""
        if self._flows is None:
            return
        try:
            self._flows.sample(is_last=self._stopped.is_set())
        except OSError as error:
            self._flows = None
            self._warn(f"connections are not recorded from here on: {error}")

    def _run(self) -> None:
        try:
            self._sample_flows()
            while not self._stopped.wait(_SAMPLE_INTERVAL_S):
                self.sample()
            self.sample()
        except Exception as error:  # the boundary of this thread: the job does not depend on counters
            self._warn(f"network and host counters stop: {type(error).__name__}: {error}")
