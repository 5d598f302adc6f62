"""Observation of collectives, switched off and on, by the compiled layer where there is one.

The compiled layer, layer.cpp, gives the same rows for less: most of what the layer in Python costs is that torch
converts every argument to Python and back, which no layer in Python can avoid. It is optional, because it must be built
against the torch that it runs with. On devices and in paced jobs the layer in Python observes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpcpace.observe.collectives.observer import CollectiveObserver, observe_blocking_calls, observe_futures
from hpcpace.observe.collectives.operations import FORGET_AFTER_STEPS, MESSAGES, GroupNumbers, Operator, operators
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TABLES, Op

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
