"""Observation of collectives: a layer over the c10d operators in torch's dispatcher.

The process group stays what it was. DDP's reducer, DTensor, pipelining and plain calls all pass through the
dispatcher, also for groups made before. A record opens when an operator is called and closes when its completion is
seen: by the caller's own wait where it blocks at once, by the work's future otherwise, on GPUs by CUDA events.
Operations that have not completed stay in `open_collectives` and so reach the journal: a hang shows. One that fails is
recorded as failed, whether its future, the wait for it or the call itself reports that.

The layer sits at the dispatch key BackendSelect. Every call passes it, for every device and in inference mode, and
torch has no kernel there for these operators, so none is replaced. `redispatch` then calls the real kernel without the
GIL. A kernel called with the GIL held (`get_kernel(...).call_boxed`) deadlocks: gloo's worker holds the group's lock
while it waits for the GIL to release a tensor.

Completions arrive on a gloo thread. Only C functions take the time there, without a Python frame: calling a Python
function makes and frees a stack for that thread each time, which was measured to add 15 us to an operation.

The compiled layer, layer.cpp, gives the same rows for less: most of what the layer in Python costs is that torch
converts every argument to Python and back, which no layer in Python can avoid. It is optional, because it must be built
against the torch that it runs with. On devices and in paced jobs the layer in Python observes.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from operator import attrgetter, contains
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from hpcpace.core.compat import dispatch_key, source_rank
from hpcpace.observe.collectives.operations import (
    FORGET_AFTER_STEPS,
    MESSAGES,
    GroupNumbers,
    ObservedGroup,
    OpenOperation,
    Operator,
    operators,
)
from hpcpace.observe.device.layer import device_work, follow_coalescing, follow_streams, runs_on_host
from hpcpace.observe.device.times import DeviceTimes, SideStreams
from hpcpace.observe.guest import leave_out_own_frames, replace
from hpcpace.observe.pacing import Arrival, Pacer
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TABLES, ExitKind, Op

_KEY, _CUDA = dispatch_key().BackendSelect, dispatch_key().CUDA
# Of a meta tensor, which only torch.compile passes here while it traces, nothing is sent, and it has no address.
_META = dispatch_key().Meta
_EXIT_KIND = 9
# Private, tried with torch 2.11 and 2.13; without it, waits for the buffers of a model count as work.
_COALESCED = "_broadcast_coalesced"


class CollectiveObserver:
    """Records every communication operation of this process while installed.

    Attributes:
        num_failures: operations that could not be recorded; training is not affected.
        pacer: is called where the caller is about to be blocked, and may delay it; None if the job is not paced.

    Args:
        groups: the numbers of groups, where other observers have recorded into the same trace.
        first_number: of the operations of each group.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        warn: Callable[[str], None],
        device_times: DeviceTimes | None,
        groups: GroupNumbers | None = None,
        first_number: int = 0,
    ) -> None:
        self.num_failures = 0
        self.pacer: Pacer | None = None
        self._last_ranks: tuple[int, ...] = ()
        self._recorder, self._add, self._warn = recorder, recorder.add_collective, warn
        self._device_times = device_times
        self._numbers, self._first_number = groups or GroupNumbers(recorder), first_number
        self._groups: dict[str, ObservedGroup] = {}
        self._open: dict[int, OpenOperation] = {}
        self._by_address: dict[int, OpenOperation] = {}
        self._completions: deque[tuple[OpenOperation, int]] = deque()
        self._now = iter(time.monotonic_ns, None)
        self._libraries: list[torch.library.Library] = []
        self._on_host: dict[str, bool] = {}
        self._habits = ExitStack()
        self._blocking_thread = 0
        self._in_blocking_call: list[OpenOperation] = []

    def install(self) -> None:
        """Install the observing layer over the operators."""
        library = torch.library.Library("c10d", "IMPL")
        functional = torch.library.Library("_c10d_functional", "IMPL")
        self._libraries = [library, functional]
        for operator in operators():
            library.impl(operator.name, self._observed(operator), _KEY.name, with_keyset=True)
        functional.impl("wait_tensor", self._observed_wait_tensor(), _KEY.name, with_keyset=True)
        replace(self._habits, dist.Work, "wait", self._observed_wait)
        observe_futures(self._habits, self._observed_wait)
        observe_blocking_calls(self._habits, self.begin_blocking_call, self.end_blocking_call)
        if self._device_times is not None:
            follow_coalescing(self._habits, self._device_times)
            follow_streams(self._habits, SideStreams(self._device_times, attrgetter("cuda_stream")))

    def detach(self) -> None:
        """Take no further operations; those that are open are followed until `uninstall`."""
        with ExitStack() as parts:  # every one, whatever another one raises
            parts.callback(self._habits.close)
            for library in self._libraries:
                parts.callback(library._destroy)
            self._libraries = []

    def uninstall(self) -> None:
        """Remove the layer; record operations that are still open as never completed."""
        self.detach()
        if self._device_times is not None:
            self._device_times.resolve()
        self._close_completed()
        remaining = list(self._open.values())
        self._open.clear()
        self._by_address.clear()
        for opened in remaining:
            if opened.future is not None and opened.future.done():  # its callback has not run yet
                opened.kind = ExitKind.FAILED if opened.has_failed else ExitKind.COMPLETION
                self._record(opened, time.monotonic_ns())
            else:
                opened.kind = ExitKind.NEVER
                self._record(opened, 0)

    @property
    def has_open(self) -> bool:
        """Whether an operation is in flight."""
        return self.has_open_on_host or (self._device_times is not None and self._device_times.has_pending)

    @property
    def has_open_on_host(self) -> bool:
        """Whether an operation is in flight that is not on a device."""
        self._close_completed()
        return bool(self._open)

    def open_collectives(self) -> list[tuple[int, ...]]:
        """Return rows of the operations that have not completed; called by the recorder at each flush."""
        self._close_completed()
        rows = []
        for opened in list(self._open.values()):
            if not opened.exit_ns:
                row = list(self._row(opened))
                row[_EXIT_KIND] = ExitKind.NEVER
                rows.append(tuple(row))
        return rows + (self._device_times.open_rows() if self._device_times is not None else [])

    def entered(self) -> list[tuple[int, int, int, int]]:
        """Return how many operations were called; safe in any thread.

        Each entry is a channel: the group's number, the kind of a message or -1 for the group's collectives, the global
        rank of the message's other end or -1, and how many were called.
        """
        counts = []
        for group in list(self._groups.values()):
            for channel, number in list(group.sequences.items()):
                op, peer = channel if isinstance(channel, tuple) else (-1, -1)
                counts.append((group.group_id, int(op), group.ranks[peer] if peer >= 0 else -1, number))
        return counts

    def take_last_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the last collective's group since the last call; empty without a collective."""
        ranks, self._last_ranks = self._last_ranks, ()
        return ranks

    def end_step(self, step: int) -> None:
        """Record operations that nobody waits for: known device times, and sends whose work was dropped."""
        if self._device_times is not None:
            self._device_times.resolve(step)
        self._close_completed()
        for opened in list(self._open.values()):
            work = opened.work
            if work is None:  # the flush thread has just recorded it
                continue
            if work.is_completed():
                opened.kind = ExitKind.FAILED if opened.has_failed else ExitKind.WAIT
                self._close(opened, opened.exit_ns or time.monotonic_ns())
            elif opened.op in MESSAGES and step - opened.step >= FORGET_AFTER_STEPS:
                opened.kind = ExitKind.NEVER
                self._close(opened, 0)

    def begin_blocking_call(self) -> None:
        """Take what this thread calls from now on as waited for by torch itself, in C++, where no wait is seen."""
        self._blocking_thread = threading.get_ident()

    def end_blocking_call(self, has_returned: bool) -> None:
        """Close what it called: it was blocked until that completed; after an error, what has not stays open."""
        end_ns = time.monotonic_ns()
        self._blocking_thread, waited, self._in_blocking_call = 0, self._in_blocking_call, []
        self._close_completed()  # only takes their times
        for opened in waited:
            opened.waiting = False
            opened.blocked_ns = (opened.exit_ns or end_ns) - opened.enter_ns
            if has_returned or opened.exit_ns:
                opened.kind = opened.kind if opened.exit_ns else ExitKind.WAIT
                self._close(opened, opened.exit_ns or end_ns)

    def _observed(self, operator: Operator) -> Callable[..., Any]:
        redispatch = operator.overload.redispatch
        clock = time.monotonic_ns
        device_times = self._device_times

        def observed(keyset: Any, *args: Any) -> Any:
            if keyset.has(_META):
                return redispatch(keyset.remove(_KEY), *args)
            arrival = None if self.pacer is None else self._arrive(self.pacer, operator, keyset, args)
            times = device_times if device_times is not None and self._is_on_device(keyset, operator, args) else None
            if times is not None and times.cannot_follow():
                return redispatch(keyset.remove(_KEY), *args)
            begin = None if times is None else times.begin()
            enter_ns = clock()
            try:
                result = redispatch(keyset.remove(_KEY), *args)
            except Exception:
                self._record_failed(operator, args, enter_ns)
                raise
            try:
                opened = self._new(operator, args, enter_ns)
                opened.arrival = arrival
                if times is not None:
                    if begin is not None:
                        is_blocking, address = operator.is_blocking(args), operator.result_address(args)
                        work = device_work(result)
                        times.follow(opened.row(), begin, work, is_blocking=is_blocking, address=address)
                    return result
                opened.blocked_ns = clock() - enter_ns  # gloo may do part of the work before it returns
                if not operator.has_work:
                    opened.kind = ExitKind.WAIT
                    self._record(opened, enter_ns + opened.blocked_ns)
                else:
                    self._follow(opened, operator, args, _work(result))
            except Exception as error:  # the boundary between hpcpace and the training job: degrade, never raise
                self._degrade(operator, error)
            return result

        return observed

    def _is_on_device(self, keyset: Any, operator: Operator, args: tuple[Any, ...]) -> bool:
        """Return whether an operation runs on the device: gloo's run on the host, whatever tensors they are given."""
        if not keyset.has(_CUDA) or not operator.has_work:
            return False
        process_group = dist.ProcessGroup.unbox(args[operator.group])
        name = process_group.group_name
        if name not in self._on_host:
            self._on_host[name] = runs_on_host(process_group)
        return not self._on_host[name]

    def _arrive(self, pacer: Pacer, operator: Operator, keyset: Any, args: tuple[Any, ...]) -> Arrival:
        """Let the pacer delay a caller that blocks at once; a caller that blocks later arrives at its wait."""
        if operator.op in MESSAGES or not operator.has_work or not operator.is_blocking(args):
            return None
        return pacer.arrive(operator.op.name.lower(), on_device=keyset.has(_CUDA))

    def _new(self, operator: Operator, args: tuple[Any, ...], enter_ns: int) -> OpenOperation:
        process_group = dist.ProcessGroup.unbox(args[operator.group])
        name = process_group.group_name
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = ObservedGroup(*self._numbers.find(process_group), self._first_number)
        size_bytes = operator.size_bytes(args, len(group.ranks))
        if operator.op not in MESSAGES:
            self._last_ranks = group.members
        return group.begin(operator.op, operator.group_peer(args), size_bytes, self._recorder.step, enter_ns)

    def _record_failed(self, operator: Operator, args: tuple[Any, ...], enter_ns: int) -> None:
        """Record an operation whose call raised."""
        try:
            opened = self._new(operator, args, enter_ns)
            if operator.has_work:  # it was never issued: the next one of the group has its number
                channel = (opened.op, operator.group_peer(args)) if opened.op in MESSAGES else None
                self._group_of(opened).sequences[channel] -= 1
            opened.kind, opened.blocked_ns = ExitKind.FAILED, time.monotonic_ns() - enter_ns
            self._record(opened, enter_ns + opened.blocked_ns)
        except Exception as error:  # the boundary between hpcpace and the training job, which gets its own error
            self._degrade(operator, error)

    def _follow(self, opened: OpenOperation, operator: Operator, args: tuple[Any, ...], work: Any) -> None:
        opened.work = work
        opened.key = id(work)  # stays valid because the record holds the object, and torch hands out the same one
        if self._blocking_thread and self._blocking_thread == threading.get_ident():
            opened.waiting = True
            self._in_blocking_call.append(opened)
        self._open[opened.key] = opened
        if operator.op in MESSAGES or operator.is_blocking(args):
            return  # gloo's point-to-point works have no future; a blocking caller waits at once and closes it
        opened.address = operator.result_address(args)
        self._by_address[opened.address] = opened

        # `contains` walks through the one element of the map, and so appends (opened, time); what it is called with,
        # the future, is what it looks for, and of no interest.
        append: Any = map(self._completions.append, zip((opened,), self._now, strict=False))
        try:
            opened.future = work.get_future()
        except RuntimeError:  # works of gloo's coalesced reduce_scatter have none either; their wait closes them
            return
        opened.future.add_done_callback(partial(contains, append))

    def _close_completed(self) -> None:
        """Record the operations whose completion was noted; one that is being waited for closes after that."""
        while self._completions:
            try:
                opened, exit_ns = self._completions.popleft()
            except IndexError:  # another thread took the last one
                return
            opened.exit_ns = exit_ns
            if opened.has_failed:
                opened.kind = ExitKind.FAILED
            if not opened.waiting:
                self._close(opened, exit_ns)

    def _observed_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        opened_works, is_compiling = self._open, torch.compiler.is_compiling

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                opened = None if is_compiling() else opened_works.get(id(work))
                if opened is None:
                    return original(work, *args, **kwargs)
                return self._blocked(opened, original, work, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        device_times = self._device_times
        if device_times is None:
            return wait

        def wait_on_device(work: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                operation = None if is_compiling() else device_times.waits_for(work)
                if operation is None:
                    return wait(work, *args, **kwargs)
                return device_times.blocked(operation, original, work, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        return wait_on_device

    def _observed_wait_tensor(self) -> Callable[..., Any]:
        redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
        by_address = self._by_address

        def observed(keyset: Any, tensor: torch.Tensor) -> Any:
            is_known = bool(by_address) and not keyset.has(_META) and not tensor.is_sparse
            opened = by_address.get(tensor.data_ptr()) if is_known else None
            if opened is None:
                return redispatch(keyset.remove(_KEY), tensor)
            return self._blocked(opened, redispatch, keyset.remove(_KEY), tensor)

        device_times = self._device_times
        if device_times is None:
            return observed

        def observed_on_device(keyset: Any, tensor: torch.Tensor) -> Any:
            operation = None if keyset.has(_META) else device_times.waits_for_address(tensor.data_ptr())
            if operation is None:
                return observed(keyset, tensor)
            return device_times.blocked(operation, redispatch, keyset.remove(_KEY), tensor)

        return observed_on_device

    def _blocked(self, opened: OpenOperation, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `wait` and add its time to the operation; where only the wait times out, the operation stays open."""
        opened.waiting = True
        pacer = self.pacer
        if pacer is not None and opened.arrival is None and opened.op not in MESSAGES:
            opened.arrival = pacer.arrive(f"wait for {opened.op.name.lower()}")
        begin_ns = time.monotonic_ns()
        try:
            result = wait(*args, **kwargs)
        except BaseException:
            self._give_up(opened, time.monotonic_ns() - begin_ns)
            raise
        end_ns = time.monotonic_ns()
        if pacer is not None and opened.arrival is not None:
            pacer.leave(opened.arrival, self._group_of(opened).members, opened.size_bytes)
        opened.blocked_ns += end_ns - begin_ns
        self._close_completed()
        if not opened.exit_ns:
            opened.kind = ExitKind.WAIT
            if opened.peer < 0 and opened.op == Op.RECV:
                self._name_source(opened)
        self._close(opened, opened.exit_ns or end_ns)
        return result

    def _give_up(self, opened: OpenOperation, blocked_ns: int) -> None:
        """Record an operation whose wait raised because it failed."""
        opened.waiting = False
        opened.blocked_ns += blocked_ns
        with suppress(Exception):  # the job gets its own error
            self._close_completed()
            if opened.work is not None and opened.work.is_completed():
                opened.kind = ExitKind.FAILED
                self._close(opened, opened.exit_ns or time.monotonic_ns())

    def _group_of(self, opened: OpenOperation) -> ObservedGroup:
        return next(group for group in self._groups.values() if group.group_id == opened.group)

    def _name_source(self, opened: OpenOperation) -> None:
        group, source = self._group_of(opened), source_rank(opened.work)
        if source < 0:
            return
        opened.peer = group.ranks[source]
        opened.seq = group.sequences[Op.RECV, source]
        group.sequences[Op.RECV, source] += 1

    def _close(self, opened: OpenOperation, exit_ns: int) -> None:
        # dict.pop is atomic: of the thread that trains and the thread that flushes, exactly one records the operation.
        if self._open.pop(opened.key, None) is None:
            return
        if self._by_address.get(opened.address) is opened:
            del self._by_address[opened.address]
        opened.work = opened.future = None
        self._record(opened, exit_ns)

    def _record(self, opened: OpenOperation, exit_ns: int) -> None:
        opened.exit_ns = exit_ns
        if exit_ns:
            opened.blocked_ns = min(opened.blocked_ns, exit_ns - opened.enter_ns)
        self._add(*self._row(opened))

    def _row(self, opened: OpenOperation) -> tuple[int, ...]:
        # Where there is a device, traces have the column enqueue_ns: operations of the host begin as they are issued.
        return opened.row() if self._device_times is None else (*opened.row(), opened.enter_ns)

    def _degrade(self, operator: Operator, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            self._warn(f"cannot record {operator.name}: {type(error).__name__}: {error}; training continues without it")


def observe_futures(cleanup: ExitStack, observed_wait: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Take a wait for the future of an operation for a wait for the operation.

    Optimizers that communicate by themselves wait like that: as work, it would hide that a rank waits for another one.

    Args:
        cleanup: until it closes.
        observed_wait: makes what observes a wait for a work, of a function that waits.
    """
    works: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def noted(get_future: Callable[..., Any]) -> Callable[..., Any]:
        def future_of(work: Any) -> Any:
            future = get_future(work)
            works[future] = work
            return future

        return future_of

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        blocked = observed_wait(lambda work, future: original(future))

        def wait(future: Any) -> Any:
            work = works.get(future)
            try:
                return original(future) if work is None else blocked(work, future)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        return wait

    replace(cleanup, dist.Work, "get_future", noted)
    replace(cleanup, torch._C.Future, "wait", observed)


def observe_blocking_calls(cleanup: ExitStack, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
    """Call functions around the broadcasts by which DDP gives all ranks the buffers of a model.

    DDP does so before each forward pass of a model that has some, such as those of batch normalization. The root waits
    for the last rank to come: by its work alone it would be late.

    Args:
        cleanup: until it closes.
        begin: called before.
        end: called after, with whether it has returned.
    """

    def observed(broadcast: Callable[..., None]) -> Callable[..., None]:
        def broadcast_coalesced(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():  # Dynamo warns of functions of ours that it cannot trace
                return broadcast(*args, **kwargs)
            begin()
            has_returned = False
            try:
                broadcast(*args, **kwargs)
                has_returned = True
            finally:
                end(has_returned)

        return broadcast_coalesced

    if hasattr(dist, _COALESCED):
        replace(cleanup, dist, _COALESCED, observed)


def _work(result: Any) -> Any:
    return dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


_SOURCE = Path(__file__).with_name("layer.cpp")
_ROW = TABLES["collectives"].dtype
_WAIT = "wait"


def find_layer() -> Any | None:
    """Return the compiled layer; None if there is none of this source for this release of torch."""
    # An extension of another release of torch must not even be loaded, so the release is in its name.
    try:
        layer = import_module(f"hpcpace.observe.collectives._layer_{re.sub(r'[^0-9A-Za-z]', '_', torch.__version__)}")
        is_current = layer.source_check == zlib.crc32(_SOURCE.read_bytes())
    except (ImportError, OSError):
        return None
    return layer if is_current else None


class CompiledObserver:
    """Records every communication operation of this process while installed; see CollectiveObserver.

    Args:
        layer: what `find_layer` returned.
    """

    def __init__(
        self,
        layer: Any,
        recorder: Recorder,
        *,
        warn: Callable[[str], None],
        groups: GroupNumbers | None = None,
        first_number: int = 0,
    ) -> None:
        self.num_failures = 0
        self._recorder = recorder
        self._warn = warn
        self._groups = groups or GroupNumbers(recorder)
        described = [layer.Operator(*_description(operator)) for operator in operators()]
        self._layer = layer.Layer(described, self._groups.find, self._degrade, recorder.max_rows, first_number)
        self._original_wait: Any = None
        self._wait: Any = None
        self._habits = ExitStack()

    def install(self) -> None:
        """Install the observing layer over the operators."""
        self._layer.step = self._recorder.step
        self._layer.install()
        self._original_wait = dist.Work.wait
        self._wait = self._layer.observed_wait(self._original_wait)
        setattr(dist.Work, _WAIT, self._wait)
        observe_futures(self._habits, self._layer.observed_wait)
        observe_blocking_calls(self._habits, self._layer.begin_blocking_call, self._layer.end_blocking_call)

    def detach(self) -> None:
        """Take no further operations; those that are open are followed until `uninstall`."""
        # Where somebody else's is on top of ours, both stay.
        if self._original_wait is not None and vars(dist.Work).get(_WAIT) is self._wait:
            setattr(dist.Work, _WAIT, self._original_wait)
        self._original_wait = None
        self._habits.close()
        self._layer.detach()

    def uninstall(self) -> None:
        """Remove the layer; record operations that are still open as never completed."""
        self.detach()
        self._layer.uninstall()
        self._pass_on()

    @property
    def has_open(self) -> bool:
        """Whether an operation is in flight."""
        has_open: bool = self._layer.has_open
        return has_open

    has_open_on_host = has_open

    def open_collectives(self) -> list[tuple[int, ...]]:
        """Return rows of the operations that have not completed; called by the recorder at each flush."""
        self._pass_on()
        rows: list[tuple[int, ...]] = np.frombuffer(self._layer.open_rows(), dtype=_ROW).tolist()
        return rows

    def entered(self) -> list[tuple[int, int, int, int]]:
        """Return how many operations were called; see CollectiveObserver."""
        counts: list[tuple[int, int, int, int]] = self._layer.entered()
        return counts

    def end_step(self, step: int) -> None:
        """Record operations that nobody waits for, and pass the rows of the step on to the recorder."""
        self._layer.end_step(step, FORGET_AFTER_STEPS)
        self._pass_on()

    def take_last_ranks(self) -> tuple[int, ...]:
        """Return nothing: only pacing asks for the ranks of the last collective, and it uses the layer in Python."""
        return ()

    def _pass_on(self) -> None:
        rows, num_dropped = self._layer.take_rows()
        if rows or num_dropped:
            self._recorder.add_packed_collectives(rows, num_dropped)

    def _degrade(self, operator_name: str, reason: str) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            first_line = reason.partition("\n")[0]
            self._warn(f"cannot record {operator_name}: {first_line}; training continues without it")


def _description(operator: Operator) -> tuple[Any, ...]:
    return (
        operator.name, int(operator.op), operator.group, operator.payload, operator.result, operator.peer,
        operator.async_op, operator.per_member, operator.has_work, operator.op in MESSAGES, operator.op == Op.RECV,
    )  # fmt: skip


Observer = CollectiveObserver | CompiledObserver


class SwitchedCollectives:
    """One observer after the other, each from where it is switched on to where it is switched off.

    Operations that are open when it is switched off are followed to their ends by the observer that saw them begin.

    Args:
        make: makes an observer that numbers the operations of each group from some number on. The first one counts
            from 0, unless it is switched on later than the recording.

    Attributes:
        current: the observer of this stretch, or of the last one.
    """

    def __init__(self, make: Callable[[int], Observer]) -> None:
        self._make = make
        self.current = make(0)
        self._is_on = False
        self._ending: list[Observer] = []

    def switch_on(self, first_number: int) -> None:
        """Begin to observe; operations of each group get numbers from this one on."""
        if first_number:
            self.current = self._make(first_number)
        self.current.install()
        self._is_on = True

    def switch_off(self) -> None:
        """Observe no further operations."""
        self.current.detach()
        self._ending.append(self.current)
        self._is_on = False

    def uninstall(self) -> None:
        """End; operations that are still open are recorded as never completed."""
        with ExitStack() as parts:
            for observer in {id(one): one for one in (*self._ending, self.current)}.values():
                parts.callback(observer.uninstall)

    @property
    def layer(self) -> str:
        """Which layer observes operations: `compiled` or `Python`."""
        return "compiled" if isinstance(self.current, CompiledObserver) else "Python"

    @property
    def has_open(self) -> bool:
        """Whether an operation is in flight, as far as operations are observed."""
        return self._is_on and self.current.has_open

    def open_collectives(self) -> list[tuple[int, ...]]:
        """Return rows of the operations that have not completed; called by the recorder at each flush."""
        observers = [*self._ending, *([self.current] if self._is_on else [])]
        # Those of one device are known to each of them.
        return list(dict.fromkeys(row for observer in observers for row in observer.open_collectives()))

    @property
    def is_complete(self) -> bool:
        """Whether every operation is observed now."""
        return self._is_on and not self.current.num_failures

    def end_step(self, step: int) -> None:
        """Record operations that nobody waits for."""
        if self._is_on:
            self.current.end_step(step)
        for observer in tuple(self._ending):
            observer.end_step(step)
            # What is pending on the device, the current one follows, too.
            if not (observer.has_open_on_host if self._is_on else observer.has_open):
                observer.uninstall()
                self._ending.remove(observer)
