"""Everything that runs while a rank records, started and stopped in order."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.core.compat import keep_uncompiled
from hpcpace.core.config import Config
from hpcpace.core.detail import ALL_STEPS, Detail, DetailPlan
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import ClockSyncError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import NUM_OURS_OF_TRACES
from hpcpace.observe.collectives.observer import CollectiveObserver
from hpcpace.observe.collectives.operations import GroupNumbers
from hpcpace.observe.collectives.switched import CompiledObserver, SwitchedCollectives, find_layer
from hpcpace.observe.device.layer import DeviceLayer, find_device
from hpcpace.observe.ends import EndEvent, TerminationTrap, end_by_signal
from hpcpace.observe.hang_snapshot import Operations, operations
from hpcpace.observe.host.connections import FlowSampler, OwnConnections
from hpcpace.observe.host.counters import HostCounters, gpu_in_use
from hpcpace.observe.host.network import NetworkCounters
from hpcpace.observe.node_local import (
    AUTO,
    PREFIX,
    NodeLocalTrace,
    bring_left_traces_home,
    find_node_local_disk,
)
from hpcpace.observe.pacing import Pacer
from hpcpace.observe.phases import PhaseObserver
from hpcpace.observe.steps import StepFinder, StepSource
from hpcpace.observe.switching import Switching
from hpcpace.observe.watchdog import Seen
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, NUMBER_BITS, TABLES, EventKind, Phase, StepFlag, TraceHeader
from hpcpace.world.clock import ClockSync
from hpcpace.world.deadline import Deadline, in_time

_FIRST_FLUSH_TIMEOUT_S = 5.0
# A disk that hangs must not cost the seconds that Slurm leaves between SIGTERM and SIGKILL (KillWait, 30 by default).
_RESCUE_TIMEOUT_S = 3.0
_RESCUE_COPY_TIMEOUT_S = 20.0
_PLACE_TIMEOUT_S = 5.0
# File systems take names of 255 bytes.
_MAX_RUN_ID = 40
_EVENT_BYTES = TABLES["events"].dtype["text"].itemsize


class Recording:
    """Records one rank's trace.

    Args:
        path: where the trace belongs in the run.
        network: the host's interfaces; None on ranks that do not record them.
        clock_sync: compares clocks with the other ranks; None if that is switched off.
        steps: finds steps; None if the job says itself where they end.
        switching: says in how much detail each step is recorded.
        warn: takes a warning.
        warn_once_for_all: takes a warning that concerns all ranks alike.

    Attributes:
        num_steps: steps that have ended.
        halfwidth_ns: uncertainty of this rank's clock at the last comparison; None before the first.
        now: the clock of what happens in the training: that of the host, and on ranks with a device a mark there, too.
    """

    def __init__(
        self,
        *,
        path: Path,
        header: TraceHeader,
        config: Config,
        clock_sync: ClockSync | None,
        network: NetworkCounters | None,
        steps: StepFinder | None,
        warn: Callable[[str], None],
        warn_once_for_all: Callable[[str], None],
        switching: Switching | None = None,
    ) -> None:
        self._copy_timeout_s = config.trace.copy_timeout_s
        self._warn, self._warn_once_for_all = warn, warn_once_for_all
        self._local = self._place_on_node(config, header, path)
        self._trap = TerminationTrap(self._rescue)
        self.num_steps = 0
        self.halfwidth_ns: int | None = None
        self._clock_sync = clock_sync
        self._cleanup = ExitStack()
        clock = find_device(warn)
        self._device = None if clock is None else DeviceLayer(clock)
        self.now = time.monotonic_ns if self._device is None else self._device.marks.now
        open_folder = partial(Folder.open, path.parent, make=True, num_ours=NUM_OURS_OF_TRACES)
        self.recorder = Recorder(
            path if self._local is None else self._local.path,
            header,
            flush_interval_s=config.trace.flush_interval_s,
            max_rows=config.trace.max_rows,
            warn=warn,
            mark=self.now,
            device_tables=() if self._device is None else DEVICE_TABLES,
            open_folder=open_folder if self._local is None else self._local.open_folder,
            keep_last=config.trace.keep_last,
        )
        if self._device is not None:
            self._device.record_into(self.recorder)
        self._switching = switching or Switching(DetailPlan.of([ALL_STEPS], Detail.FULL), "", warn=warn)
        self.recorder.keeps = None if switching is None else switching.keeps
        self._groups = GroupNumbers(self.recorder)
        self._collectives = SwitchedCollectives(partial(self._new_observer, config))
        self.recorder.open_collectives = self._collectives.open_collectives
        self.phases = PhaseObserver(
            self.recorder,
            has_open_collectives=lambda: self._collectives.has_open,
            steps=steps,
            warn=warn,
            take_last_ranks=lambda: self._collectives.current.take_last_ranks(),
            now=self.now,
        )
        self.steps = steps
        self._host = HostCounters(warn=warn)
        self._counters: CounterThread | None = None
        if config.trace.counters:
            most = config.trace.flows
            flows = FlowSampler(self.recorder, OwnConnections().read, most=most) if most else None
            self._counters = CounterThread(self.recorder, self._host, network, flows, warn=warn)
        self._seeks_gpu = self._device is not None and config.trace.counters
        self._find_gpu()

    def start(self, first_step: int = 0) -> None:
        """Start to record. Collective: the clocks are compared for the first time."""
        self.recorder.start()
        # The file exists from the first step on, even if the rank dies within its first second.
        self.recorder.flush(_FIRST_FLUSH_TIMEOUT_S)
        if self._trap.install():
            self._cleanup.callback(self._trap.remove)
        if self._counters is not None:
            self._counters.start()
        if self._clock_sync is not None and self._clock_sync.due(first_step):
            self._synchronise(first_step)
        self.recorder.step = first_step
        keep_uncompiled()
        self._switching.live = self._switching.plan.at(first_step)
        if not self._switching.plan.is_always_full:
            self._add_event(EventKind.SWITCH, self._switching.live, self._switching.why)
        if self._switching.live >= Detail.COLLECTIVES:
            self._collectives.switch_on(0)
        if self._observes_phases:
            self.phases.install()
        if self._device is not None:
            self._device.start(self._cleanup)

    def pace_by(self, pacer: Pacer) -> None:
        """Call the pacer wherever this rank is blocked; use this before `start`."""
        assert isinstance(self._collectives.current, CollectiveObserver)
        self._collectives.current.pacer = self.phases.backward.pacer = pacer

    def add_pacing(self, *row: int) -> None:
        """Record a row of the `pacing` table."""
        self.recorder.add_pacing(*row)

    def add_delay(self, begin_ns: int, end_ns: int) -> None:
        """Record a delay in the current step."""
        self.recorder.add_phase(self.recorder.step, Phase.PACE, begin_ns, end_ns, -1)

    def end_step(self, step: int, begin_ns: int, end_ns: int, samples: int, flags: int) -> None:
        """Record a step and prepare the next. Collective in those steps in which the clocks are compared."""
        # Less than the plan says where steps are found only after they have ended.
        detail = min(self._switching.plan.at(step), self._switching.live)
        if detail < Detail.FULL:
            # A warm-up without phases needs no mark of its own.
            is_plain = detail == Detail.STEPS or flags & StepFlag.WARMUP
            flags |= StepFlag.WARMUP | (StepFlag.PLAIN if is_plain else StepFlag.UNPHASED)
        self.recorder.add_step(step, begin_ns, end_ns, samples, flags)
        self._collectives.end_step(step)
        self.num_steps += 1
        if self._seeks_gpu:
            self._find_gpu()
        if self._device is not None:
            self._device.end_step(self.num_steps, is_shared=self._clock_sync is not None)
        self.recorder.step = step + 1
        if self._clock_sync is not None and self._clock_sync.due(step + 1):
            self._synchronise(step + 1)

    def begin_step(self, step: int) -> None:
        """Switch to the detail of a step that begins now, between two operations that are the same on all ranks."""
        detail, before = self._switching.plan.at(step), self._switching.live
        if detail == before:
            return
        had_phases = self._observes_phases
        self._switching.live = detail
        if before >= Detail.COLLECTIVES > detail:
            self._collectives.switch_off()
        elif detail >= Detail.COLLECTIVES > before:
            # Ranks that begin with the same step number the same operations alike; others have other numbers.
            self._collectives.switch_on(step << NUMBER_BITS)
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

    def _find_gpu(self) -> None:
        """Have the counters of this rank's GPU read once this thread uses one: each has a current device of its own."""
        gpu = gpu_in_use() if self._seeks_gpu else None
        if gpu is not None:
            self._host.use_gpu(gpu)
            self._seeks_gpu = False

    def add_end(self, end: EndEvent) -> None:
        """Record how the program of this rank ends."""
        self.recorder.add_event(time.monotonic_ns(), self.recorder.step, *end)

    def hold_steps_after(self, step: int) -> None:
        """Keep the rows of later steps in memory until `settle_steps`."""
        self.recorder.hold_steps_after(step)

    def number_rows(self, step: int) -> None:
        """Give a step number to all rows from here on."""
        self._collectives.end_step(step - 1)
        self.recorder.step = step

    def settle_steps(self, numbers: Mapping[int, int], step: int) -> None:
        """Change the step numbers of rows that are kept in memory, and go on with `step`."""
        self.number_rows(step)
        self.recorder.settle_steps(numbers)

    def add_step_source(self, source: StepSource) -> None:
        """Record how steps are found."""
        self._add_event(EventKind.STEP_SOURCE, source.num_irregular, str(source))

    def finish_steps(self, *, in_order: bool) -> None:
        """Decide on the last steps and record how steps, phases and samples were found. Collective if `in_order`."""
        if not in_order:
            self._clock_sync = None  # the other ranks may not come to another comparison
        if self.steps is not None:
            self.steps.finish()
            if self.phases.samples.source:
                self._add_event(EventKind.SAMPLES_SOURCE, 1, self.phases.samples.source)
        self._add_event(EventKind.PHASE_SOURCE, len(self.phases.seen), self.phases.source)

    def _add_event(self, kind: EventKind, code: int, text: str) -> None:
        self.recorder.add_event(time.monotonic_ns(), self.recorder.step, kind, code, text.encode()[:_EVENT_BYTES])

    def close(self, *, in_order: bool) -> None:
        """End the recording. Collective if `in_order`: the clocks are compared for the last time.

        Every part ends, whatever another one raises; the last error is raised again.
        """
        with ExitStack() as parts:  # which end in the opposite order
            parts.callback(self._end_clock, in_order)
            parts.callback(self._end_file)
            if self._counters is not None:
                parts.callback(self._counters.stop)
            parts.callback(self._collectives.uninstall)
            if self._device is not None:
                parts.callback(self._end_device, self._device, in_order)
            if in_order:
                parts.callback(self._synchronise, self.recorder.step)
            parts.callback(self.phases.uninstall)

    def _end_device(self, device: DeviceLayer, in_order: bool) -> None:
        self._add_event(EventKind.DEVICE_SOURCE, *device.end(in_order=in_order))

    def _end_file(self) -> None:
        with self._cleanup:
            is_written = self.recorder.close()
        # Of a disk that hangs, the recorder has said so.
        if self._local is not None and is_written:
            self._bring_home(self._local, self._copy_timeout_s, is_last=True)

    def _end_clock(self, in_order: bool) -> None:
        clock_sync, self._clock_sync = self._clock_sync, None
        if in_order and clock_sync is not None:
            clock_sync.close()

    def _new_observer(self, config: Config, first_number: int) -> CollectiveObserver | CompiledObserver:
        may_be_compiled = config.trace.compiled and not config.pace.is_on and self._device is None
        layer = find_layer() if may_be_compiled else None
        numbers: dict[str, Any] = {"groups": self._groups, "first_number": first_number}
        if layer is not None:
            return CompiledObserver(layer, self.recorder, warn=self._warn, **numbers)
        device_times = None if self._device is None else self._device.times
        return CollectiveObserver(self.recorder, warn=self._warn, device_times=device_times, **numbers)

    def _synchronise(self, step: int) -> None:
        if self._clock_sync is None:
            return
        if self._device is not None:
            self._device.anchor()
        self._collectives.current.paused = True  # while hpcpace itself communicates
        self._clock_sync.notice = self._switching.notice
        try:
            sample = self._clock_sync.sync(step)
        except ClockSyncError as error:
            self._clock_sync = None
            self._warn_once_for_all(
                f"clock comparisons stop: {error}; times of different hosts lose precision from here on"
            )
        else:
            self.recorder.add_clock(*sample)
            self.halfwidth_ns = sample.halfwidth_ns
            self._switching.hear(self._clock_sync.notice, step)
        finally:
            self._collectives.current.paused = False

    def seen(self) -> Seen:
        """Return what shows whether this rank moves; safe in any thread, and cheap."""
        regions = self.recorder.regions_under_way()
        named = next((region for region in regions if region[0] in (Phase.CHECKPOINT, Phase.EVAL)), None)
        return Seen(
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

    def rescue(self, end: EndEvent) -> None:
        """Bring to disk what is in memory, and record how the program ends: it does so without closing the trace."""
        self._save(end, is_last=True)

    def _rescue(self) -> None:
        self._save(end_by_signal(signal.SIGTERM), is_last=self._trap.is_decisive)

    def _save(self, end: EndEvent, *, is_last: bool) -> None:
        self.add_end(end)
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
                self._bring_home(self._local, timeout_s, is_last=is_last)

    def _place_on_node(self, config: Config, header: TraceHeader, path: Path) -> NodeLocalTrace | None:
        """Return where the trace is on node-local disk while the job runs; None if that is the run itself."""
        trace_dir = config.trace.trace_dir
        if trace_dir is None:
            return None
        try:
            return in_time(partial(_make_place, trace_dir, header, path), _PLACE_TIMEOUT_S, "the node-local disk")
        except OSError as error:
            # The ranks of a node have one disk. That a name is taken is a matter of one rank.
            if header.local_rank <= 0 or isinstance(error, FileExistsError):
                reason = error.strerror or str(error)
                self._warn(f"trace.trace_dir is {trace_dir}, but the trace is written into the run at once: {reason}")
            return None

    def _bring_home(self, trace: NodeLocalTrace, timeout_s: float, *, is_last: bool) -> None:
        """Copy the trace from a node-local disk into the run, and with it those of ranks of this node that were killed.

        Args:
            is_last: whether nothing is recorded after this, so that the trace is removed from the disk.
        """
        deadline = Deadline(timeout_s)
        try:
            trace.bring_home(timeout_s)
        except OSError as error:
            reason = error.strerror or str(error)
            self._warn(
                f"the trace stays in {trace.path}: copying it to {trace.destination} failed: {reason}; "
                "copy it, and the journal next to it, before the disk is cleared"
            )
        else:
            if is_last:
                trace.remove()
        with suppress(OSError):  # `hpcpace collect` finds what is left
            place = trace.path.parent
            homes = [trace.destination.parent]
            bring_left_traces_home(place.parent, homes, timeout_s=deadline.left_s, own_name=place.name)


def _make_place(trace_dir: Path, header: TraceHeader, path: Path) -> NodeLocalTrace:
    """Make a folder for a rank's trace on node-local disk, by a name that no other rank and no earlier job has used."""
    if trace_dir == AUTO:
        trace_dir = find_node_local_disk(process_environ(), max(header.local_size, 1))
    if trace_dir.exists() and not trace_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(trace_dir))
    run_id = header.run_id[:_MAX_RUN_ID]
    name = f"{PREFIX}{run_id}-attempt-{header.attempt}-rank-{header.rank}-{header.created_unix_ns}"
    trace = NodeLocalTrace(trace_dir.absolute(), name, path)
    trace.open_folder().close()
    return trace


class CounterThread:
    """Samples until stopped; a counter that fails ends the sampling with one warning, never the job.

    Args:
        network: counters of the host, None on ranks that do not record them.
        flows: records the connections of this process, None if they are not recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        host: HostCounters,
        network: NetworkCounters | None,
        flows: FlowSampler | None = None,
        *,
        warn: Callable[[str], None],
        interval_s: float = 1.0,
    ) -> None:
        self._recorder, self._warn, self._interval_s = recorder, warn, interval_s
        self._host, self._network, self._flows = host, network, flows
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcpace-counters", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stopped.set()
        self._thread.join(timeout=2 * self._interval_s)

    def sample(self) -> None:
        """Record one row of each table, and of each connection that is due."""
        now_ns = time.monotonic_ns()
        self._recorder.add_host(now_ns, *self._host.read())
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
            while not self._stopped.wait(self._interval_s):
                self.sample()
            self.sample()
        except Exception as error:  # the boundary of this thread: the job does not depend on counters
            self._warn(f"network and host counters stop: {type(error).__name__}: {error}")
