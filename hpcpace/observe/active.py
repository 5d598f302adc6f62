"""A session while it records: one rank's steps, recording and pacing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import RankFacts, RankGpu, Snapshot
from hpcpace.audit.snapshot import take_host, take_rank, with_ranks
from hpcpace.audit.snapshot_files import NUM_OURS_OF_RUN, save_snapshots
from hpcpace.audit.tree import Tree
from hpcpace.core.codec import convert, plain
from hpcpace.core.environment import RankInfo, process_environ
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.observe.alarm import PAUSE_S, Alarm
from hpcpace.observe.ends import EndEvent
from hpcpace.observe.exporters import Exporters
from hpcpace.observe.guest import Warner
from hpcpace.observe.host.network import find_network_counters
from hpcpace.observe.joined import JoinedRank
from hpcpace.observe.pacing import OpenPacing, Pacer
from hpcpace.observe.recording import Recording
from hpcpace.observe.steps import StepFinder, StepSource
from hpcpace.observe.switching import OrderSources, find_switching
from hpcpace.observe.watchdog import Watchdog
from hpcpace.trace.schema import Phase, StepFlag
from hpcpace.world.deadline import Deadline, in_time
from hpcpace.world.messages import Messages, NoMessages

# A file system that hangs, like that of ~/.nccl.conf, must not keep the job from training.
_SNAPSHOT_TIMEOUT_S = 5.0


class ActiveSession:
    """Records one rank and paces it, from `start` to `close`. Collective: every rank makes one.

    Args:
        joined: this rank, with a trace enabled.
        attempt: the folder of this attempt.
        warner: warns the user.
        steps: finds steps; None if the job says itself where they end.
        open_pacing: opens the pacer; None where the job is not paced.

    Attributes:
        step: number of the step that is running.
        recording: what observes the job and writes the trace.
        watchdog: notices steps that last too long; None where no step is watched.
    """

    def __init__(
        self,
        joined: JoinedRank,
        attempt: Attempt,
        warner: Warner,
        *,
        steps: StepFinder | None,
        open_pacing: OpenPacing | None,
    ) -> None:
        config, world, settings = joined.config, joined.world, joined.settings
        self.step = settings.first_step
        self._settings, self._num_ranks, self._warn = settings, world.world_size, warner.warn
        self._step_flags = StepFlag.NONE
        self._begin_ns = 0
        # Before anything that can fail on one rank alone: the others would wait for it here.
        make_pacer = (
            None
            if open_pacing is None
            else open_pacing(
                config.pace,
                comm=settings.comm,
                world=world,
                host_key=joined.identity.host_key,
                attempt=attempt,
                first_step=settings.first_step + max(settings.warmup_steps, 1),
                warn=warner.warn,
            )
        )
        clock_sync = joined.make_clock_sync()
        if config.trace.snapshot:
            _save_snapshots(joined, attempt, warner)
        # What it warns of, all ranks find alike.
        switching = find_switching(config, warn=warner.warn if world.rank == 0 else lambda message: None)
        self.recording = Recording(
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
        self._orders: OrderSources | None = None
        if clock_sync is not None and make_pacer is None:  # the ranks hear of orders as they compare their clocks
            run, name = RunDirectory(attempt.path.parent), config.trace.switch_signal
            self._orders = OrderSources(switching, run, rank=world.rank, signal_name=name, warn=warner.warn)
        self._pacer: Pacer | None = None
        if make_pacer is not None:
            self._pacer = make_pacer(self.recording)
            self.recording.pace_by(self._pacer)
            self._pacer.start()
        self.watchdog = _watchdog(joined, attempt, self.recording, warner)
        self._exporters = _exporters(joined, attempt, self.recording, warner)

    def start(self) -> None:
        """Start to record. Collective: the clocks are compared for the first time."""
        self.recording.start(self._settings.first_step)
        if self._orders is not None:
            self._orders.start()
        if self._exporters is not None:
            self._exporters.start()
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
        if self.step < self._settings.first_step + self._settings.warmup_steps:
            flags |= StepFlag.WARMUP
        self.recording.end_step(self.step, self._begin_ns, end_ns, samples, flags)
        if self._exporters is not None:
            self._exporters.end_step(self._begin_ns, end_ns, samples)
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

    @contextmanager
    def paced_block(self, name: str) -> Iterator[None]:
        """Pace a block of the job's own, in which all ranks wait for each other."""
        pacer = self._pacer
        arrival = None if pacer is None else pacer.arrive(name)
        yield
        if pacer is not None:
            pacer.leave(arrival, tuple(range(self._num_ranks)))

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
            self._end(partial(self._pacer.close, in_order=in_order), "the result of pacing is lost")
        self._end(partial(self.recording.finish_steps, in_order=in_order), "the last steps may be missing")
        self._end(partial(self.recording.close, in_order=in_order), "the trace may lack its end")
        if self._exporters is not None:
            self._end(self._exporters.close, "the centre is not told of the end")

    def _end(self, part: Callable[[], object], loss: str) -> None:
        try:
            part()
        except Exception as error:  # the boundary to somebody else's job
            self._warn(f"{loss}: {error or type(error).__name__}")


def _save_snapshots(joined: JoinedRank, attempt: Attempt, warner: Warner) -> None:
    # Not the environment in the settings: since then torch's group has set the interface of gloo and NCCL.
    environ, folder = process_environ(), attempt.snapshot_dir
    keys, deadline = joined.host_keys, joined.deadline
    save_host_snapshots(joined.messages, joined.world, keys, environ, folder, warn=warner.warn, deadline=deadline)


def _exporters(joined: JoinedRank, attempt: Attempt, recording: Recording, warner: Warner) -> Exporters | None:
    config, world, host = joined.config.metrics, joined.world, joined.identity.host
    if config.prometheus is None and not config.job_comment:
        return None
    return Exporters(config, world=world, host=host, attempt=attempt, recording=recording, warn=warner.warn)


def _watchdog(joined: JoinedRank, attempt: Attempt, recording: Recording, warner: Warner) -> Watchdog | None:
    settings, rank = joined.config.hang, joined.world.rank
    if settings.on_hang == "off":
        return None
    alarm = Alarm(
        attempt,
        rank,
        num_ranks=joined.world.world_size,
        stops=settings.on_hang == "stop",
        tell=warner.tell,
        pause_s=min(PAUSE_S, settings.least_s),
    )
    return Watchdog(
        rank=rank,
        identity=joined.identity,
        attempt=attempt,
        settings=settings,
        watched=recording,
        alarm=alarm,
        warn=warner.warn,
    )


class InferredSteps:
    """Ends the steps of a session as a StepFinder finds them; see there for `mark`, `settle` and the others.

    Args:
        active: the session.
        failed: takes an error of the recording, which must not reach the job.
    """

    def __init__(self, active: ActiveSession, *, failed: Callable[[Exception], None]) -> None:
        self._active, self._failed = active, failed
        self._marked: list[tuple[int, StepFlag]] = []  # samples and marks of the rows before each mark
        self._first = 0
        self._carried = (0, StepFlag.NONE)

    def mark(self) -> None:
        """Number rows provisionally: a step may have ended here."""
        with self._boundary():
            if not self._marked:
                self._first = self._active.step
                self._active.recording.hold_steps_after(self._first)
            self._active.recording.number_rows(self._first + len(self._marked) + 1)
            self._marked.append(self._take())

    def settle(self, steps: Sequence[int], ends_ns: Sequence[int]) -> None:
        """Number the rows between marks, and record the steps that are over."""
        with self._boundary():
            marked, self._marked = self._marked, []
            numbers = {self._first + mark: self._first + step for mark, step in enumerate(steps)}
            self._active.recording.settle_steps(numbers, self._first + steps[-1])
            totals = [(0, StepFlag.NONE)] * (len(ends_ns) + 1)
            totals[0] = self._carried
            for step, (samples, flags) in zip(steps, marked, strict=False):
                totals[step] = (totals[step][0] + samples, totals[step][1] | flags)
            for end_ns, (samples, flags) in zip(ends_ns, totals, strict=False):
                self._active.end_step(end_ns, samples, flags)
                self._active.begin_step(end_ns)
            self._carried = totals[-1]

    def end_step(self, end_ns: int) -> None:
        """End the step that is running."""
        with self._boundary():
            samples, flags = self._take()
            (carried, marks), self._carried = self._carried, (0, StepFlag.NONE)
            self._active.end_step(end_ns, samples + carried, flags | marks)
            self._active.begin_step()

    def tell_source(self, source: StepSource) -> None:
        """Record how steps are found from here on."""
        with self._boundary():
            self._active.recording.add_step_source(source)

    def _take(self) -> tuple[int, StepFlag]:
        phases = self._active.recording.phases
        return phases.samples.take(), phases.end_step()

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to somebody else's job
            self._failed(error)


def save_host_snapshots(
    messages: Messages | NoMessages,
    world: RankInfo,
    host_keys: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    warn: Callable[[str], None],
    deadline: Deadline,
) -> None:
    """Save the snapshot of each host, on its first rank, as HOST.json.

    Collective: every rank of the job calls this.

    Args:
        messages: between the ranks.
        world: this rank's place.
        host_keys: of all ranks; equal on ranks of one host.
        environ: of this rank.
        folder: the target, as `Attempt.snapshot_dir`.
        warn: takes a warning about what failed.
        deadline: by when all of it must be done.

    Raises:
        WorldError: a rank did not answer by then.
    """
    part: dict[str, Any] = {"host": world.host, "rank": world.rank}
    host: Snapshot | None = None
    try:
        gpu, nccl_version = _own_gpu(), _nccl_version()  # here, because each thread has a current device of its own
        read = partial(_read, world, environ, gpu, nccl_version)
        timeout_s = min(_SNAPSHOT_TIMEOUT_S, deadline.left_s)
        facts, unreadable, host = in_time(read, timeout_s, "reading /sys and /proc")
        part |= {"facts": plain(facts), "unreadable": unreadable}
    except Exception as error:  # the boundary to somebody else's job, whose other ranks wait for our part
        warn(f"no snapshot for the audit: {error or type(error).__name__}")
    parts = messages.allgather(part, deadline.left_s)
    if host is None:
        return
    try:
        own = [other for other, key in zip(parts, host_keys, strict=True) if key == host_keys[world.rank]]
        snapshot = _joined(_named(host, parts, host_keys, world.rank), own)
        save = partial(save_snapshots, folder, [snapshot], num_ours=NUM_OURS_OF_RUN)
        in_time(save, deadline.left_s, f"writing to {folder}")
    except Exception as error:  # the boundary to somebody else's job
        warn(f"the audit's snapshot of {world.host} is not saved: {error or type(error).__name__}")


def _read(
    world: RankInfo, environ: Mapping[str, str], gpu: RankGpu | None, nccl_version: str
) -> tuple[RankFacts, dict[str, str], Snapshot | None]:
    facts, unreadable = take_rank(world, environ, gpu=gpu, nccl_version=nccl_version)
    return facts, unreadable, take_host(Tree(), host=world.host) if world.local_rank == 0 else None


def _joined(host: Snapshot, parts: Sequence[Mapping[str, Any]]) -> Snapshot:
    """Return the snapshot of a host with those of its ranks that could read what they have."""
    made = [part for part in parts if "facts" in part]
    ranks = [convert(part["facts"], RankFacts) for part in made]
    reasons = {name: reason for part in made for name, reason in part["unreadable"].items()}
    lost = {f"rank/{part['rank']}": "it could not read what it has" for part in parts if "facts" not in part}
    return with_ranks(host, ranks, reasons | lost)


def _named(host: Snapshot, parts: Sequence[Mapping[str, Any]], host_keys: Sequence[str], rank: int) -> Snapshot:
    """Return a snapshot with a number added to its name where other hosts, as containers may, have the same."""
    namesakes = {key: None for part, key in zip(parts, host_keys, strict=True) if part["host"] == parts[rank]["host"]}
    number = list(namesakes).index(host_keys[rank])
    return dataclasses.replace(host, host=f"{host.host}#{number + 1}") if number else host


def _own_gpu() -> RankGpu | None:
    """Return the GPU that torch computes on; None where it has not begun to use any, so as not to begin it here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    of_torch = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(of_torch, name) for name in (*names, "uuid")):
        return None
    domain, bus, device = (int(getattr(of_torch, name)) for name in names)
    return RankGpu(address=f"{domain:04x}:{bus:02x}:{device:02x}.0", uuid=f"GPU-{of_torch.uuid}")


def _nccl_version() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else ""
