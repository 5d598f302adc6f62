"""Switches the level of detail while a job runs: by steps, by a file, and by a signal.

Ranks must agree on the step from which a level holds. Steps from the settings are the same on all ranks. The file and
the signal count on rank 0 alone, which gives the order to the others with the next comparison of the clocks, for a step
that none of them has reached. Nothing is added to the collectives of the job.

An order is followed if its file belongs to the user of the job or to root and nobody else can write to it. The folder
does not matter for that: whoever can write to it can remove an order, or bring an earlier one back, but not give one.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.config import NO_POLICY, Config
from hpcpace.core.detail import ALL_STEPS, Detail, DetailPlan, Order, parse_detail, parse_order, parse_steps
from hpcpace.core.files import Folder, other_writers, read_most
from hpcpace.core.rundir import RunDirectory
from hpcpace.observe.ends import act_by_default, has_default_action
from hpcpace.observe.settings import TraceConfig

NO_SIGNAL = "none"

_LOOK_EVERY_S = 2.0
_MAX_BYTES = 4096
# Of a job that runs for weeks, in a folder where files without an order come and go.
_MAX_WARNINGS = 4
_MIN_DETAIL = {"collectives": Detail.COLLECTIVES, "phases": Detail.FULL}

Notice = tuple[int, int, int, int]
"""An order between ranks: its number, the level, and the steps."""

NO_NOTICE: Notice = (0, 0, 0, 0)


class Switching:
    """The level of detail of one rank, step by step.

    Args:
        plan: what the settings say.
        why: the same in words, for the trace.
        warn: takes a warning.

    Attributes:
        plan: which level holds in which steps.
        why: what the last level follows from.
        live: the level at which this rank observes now.
        notice: the last order, for the other ranks; rank 0 gives it, the others hear it.
    """

    def __init__(self, plan: DetailPlan, why: str, *, warn: Callable[[str], None]) -> None:
        self.plan, self.why = plan, why
        self.live = plan.at(0)
        self.notice = NO_NOTICE
        self._warn = warn
        self._num_heard = 0

    def give(self, order: Order) -> None:
        """Give an order, on rank 0; it takes effect when all ranks have heard it."""
        self.notice = (self.notice[0] + 1, int(order.detail), *order.steps)

    def hear(self, notice: tuple[int, ...], step: int) -> None:
        """Follow an order that all ranks hear before a step; one that was heard before changes nothing."""
        number, detail, first, stop = notice[: len(NO_NOTICE)]
        if number == self._num_heard:
            return
        order = Order(Detail(detail), (first, stop))
        self._num_heard = number
        self.plan, self.why = self.plan.follow(order, step), f"order {number}: {order.text}"
        if stop <= step:
            self._warn(f"the order {order.text!r} came before step {step}: nothing more is recorded in detail")

    def keeps(self, table: str, step: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which rows of a table belong to steps that are recorded in such detail, bool, (num_rows,)."""
        plan, least = self.plan, _MIN_DETAIL.get(table, Detail.STEPS)
        has_detail = np.array([detail >= least for detail in plan.details])
        kept: NDArray[np.bool_] = has_detail[np.searchsorted(plan.starts, np.maximum(step, 0), side="right") - 1]
        return kept

    def toggle(self) -> None:
        """Order full detail, or the least if this rank observes more than that now; on rank 0."""
        self.give(Order(Detail.STEPS if self.live > Detail.STEPS else Detail.FULL))


def find_switching(config: Config, *, warn: Callable[[str], None]) -> Switching:
    """Return what the settings say about the detail of steps; a paced job is recorded in full, as pacing needs it.

    Args:
        config: the configuration.
        warn: takes a warning that concerns all ranks alike.
    """
    trace = config.of(TraceConfig)
    plan = DetailPlan.of(parse_steps(trace.detail_steps), parse_detail(trace.detail))
    if plan.is_always_full or config["pace.policy"] == NO_POLICY:
        steps = f"steps {trace.detail_steps}" if trace.detail_steps else "all steps"
        return Switching(plan, f"settings: {steps}, {trace.detail}", warn=warn)
    warn("all steps are recorded in full, whatever trace.detail_steps and trace.detail say: pacing needs it")
    return Switching(DetailPlan.of([ALL_STEPS], Detail.FULL), "pacing", warn=warn)


class OrderFile:
    """Looks every few seconds for the file with an order in the run directory, from a thread of its own.

    Args:
        run: the run directory.
        give: takes an order.
        warn: takes a warning, of a file that is not followed: each reason once, and only a few in all.
    """

    def __init__(self, run: RunDirectory, *, give: Callable[[Order], None], warn: Callable[[str], None]) -> None:
        self._run, self._give, self._warn = run, give, warn
        self._seen = b""
        self._objections: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpcpace-switch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End; a file system that hangs is not waited for."""
        self._stopped.set()

    def look(self) -> None:
        """Give the order in the file, if it is another one than at the last look; without a file, nothing changes."""
        try:
            with Folder.open(self._run.path) as folder:
                content = _read_order(folder, self._run.switch_file.name)
        except FileNotFoundError:
            return
        except OSError as error:
            self._object(error.strerror or str(error))
            return
        if not content or content == self._seen:  # a shell empties a file before it writes
            return
        self._seen = content
        try:
            self._give(parse_order(content.decode(errors="replace")))
        except ValueError as error:
            self._object(str(error))

    def _object(self, reason: str) -> None:
        """Warn that the file is not followed, unless that was said before, or too often."""
        if reason in self._objections or len(self._objections) == _MAX_WARNINGS:
            return
        self._objections.add(reason)
        more = "; further reasons are not shown" if len(self._objections) == _MAX_WARNINGS else ""
        self._warn(f"{self._run.switch_file} is not followed: {reason}{more}")

    def _watch(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # the boundary of this thread: the job does not depend on it
                self._warn(f"{self._run.switch_file} is not followed any more: {error or type(error).__name__}")
                return
            if self._stopped.wait(_LOOK_EVERY_S):
                return


def _read_order(folder: Folder, name: str) -> bytes:
    """Return the content of a file with an order.

    Raises:
        OSError: it cannot be read, is very long, or is not the work of this user or root alone.
    """
    descriptor = folder.open_file(name)
    try:
        if writers := other_writers(os.fstat(descriptor)):
            raise OSError(errno.EPERM, f"it {writers}; give orders as the user of the job, by `hpcpace switch`")
        return read_most(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


class OrderSignal:
    """Turns detail off and on again by a signal, unless the program or its libraries have a handler for it.

    All ranks take the signal, whose default action would end them; only rank 0 gives an order.

    Args:
        name: of the signal, such as `USR1`.
        toggle: called on rank 0 when it arrives; None on other ranks.
        warn: takes a warning that it is not taken.
    """

    def __init__(self, name: str, toggle: Callable[[], None] | None, *, warn: Callable[[str], None]) -> None:
        self._number, self._toggle, self._warn = signal.Signals[f"SIG{name}"], toggle, warn
        self._is_installed = self._is_over = False

    def start(self) -> None:
        """Take the signal."""
        if threading.current_thread() is not threading.main_thread():
            self._warn(f"{self._number.name} switches nothing: the session was not entered in the main thread")
        elif not has_default_action(self._number):
            self._warn(f"{self._number.name} switches nothing: the program handles it itself")
        else:
            signal.signal(self._number, self._arrived)
            signal.siginterrupt(self._number, False)  # system calls of the job go on
            self._is_installed = True

    def stop(self) -> None:
        """Give the signal its default action back, unless the program has taken it since."""
        self._is_over = True
        is_ours = self._is_installed and signal.getsignal(self._number) == self._arrived
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, signal.SIG_DFL)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            act_by_default(number, self._arrived)
        elif self._toggle is not None:
            self._toggle()
