"""Injected faults: a rank or a host is slower than the others in one phase, by a known amount.

A share is added to each piece of the phase (each block and the head, none of which waits for another stage or
replica) straight after it. On a CPU it is a share of the processor time of the piece, and processor time is what is
spent: the rank then has 1.3 times the work to do, as on a slower core, also where there are more ranks than cores. (A
sleep would be made good there: the scheduler hands a rank that slept its core back at once.) On a GPU it is a share of
the time that the device took, and the rank sleeps. A fixed size is a sleep. With tensor parallelism a block has its
own all-reduces in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_S, NS_PER_US

PHASES = {"forward": ("forward",), "backward": ("backward",), "compute": ("forward", "backward"), "data": ("data",)}
KINDS = ("persistent", "random", "periodic")
GRAMMAR = (
    "write rank=N or host=NAME, phase=forward|backward|compute|data, size=30% (of the phase) or 20ms (a step), and "
    "optionally kind=random,p=0.1 or kind=periodic,period=10, like rank=2,phase=forward,size=30%"
)
_MOST, _MAX_SHARE, _MAX_PAUSE_S = 1_000_000_000, 1000.0, 3600
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_UNITS_NS = {"us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """One slow-down.

    Attributes:
        rank, host: what to slow; exactly one of them is given.
        phases: the phases to slow.
        share: what to add to the phase's own time, as a share of it; 0 if `pause_ns` is given.
        pause_ns: what to add once a step, in the first of the phases that comes.
        kind: persistent (each step), random (a step with `probability`) or periodic (every `period` steps).
    """

    rank: int | None = None
    host: str | None = None
    phases: tuple[str, ...]
    share: float = 0.0
    pause_ns: int = 0
    kind: str = "persistent"
    probability: float = 0.1
    period: int = 10

    def concerns(self, rank: int, host: str) -> bool:
        """Return whether this fault slows a rank."""
        return rank == self.rank if self.host is None else host.split(".")[0] == self.host.split(".")[0]

    def acts(self, step: int, *, seed: int, rank: int) -> bool:
        """Return whether this fault slows a step; known from the run's settings alone."""
        if self.kind == "random":
            return bool(np.random.default_rng([seed, step, rank]).random() < self.probability)
        return self.kind == "persistent" or step % self.period == self.period - 1


def parse_fault(spec: str) -> InjectedFault:
    """Read a fault like `rank=2,phase=forward,size=30%`.

    Raises:
        ConfigError: with the grammar.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"fault {spec!r}: {reason}; {GRAMMAR}")

    fields: dict[str, str] = {}
    for part in spec.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or key not in ("rank", "host", "phase", "size", "kind", "p", "period"):
            raise refuse(f"cannot read {part.strip()!r}")
        if key in fields:
            raise refuse(f"{key} is given twice")
        fields[key] = value
    if ("rank" in fields) == ("host" in fields):
        raise refuse("give exactly one of rank and host")
    phase, kind = fields.get("phase", "compute"), fields.get("kind", "persistent")
    if phase not in PHASES:
        raise refuse(f"unknown phase {phase!r}")
    if kind not in KINDS:
        raise refuse(f"unknown kind {kind!r}")
    if ("p" in fields and kind != "random") or ("period" in fields and kind != "periodic"):
        raise refuse("p belongs to kind=random and period to kind=periodic")
    try:
        share, pause_ns = _size(fields.get("size", ""))
        fault = InjectedFault(
            rank=int(fields["rank"]) if "rank" in fields else None,
            host=fields.get("host"),
            phases=PHASES[phase],
            share=share,
            pause_ns=pause_ns,
            kind=kind,
            probability=float(fields.get("p", "0.1")),
            period=int(fields.get("period", "10")),
        )
    except ValueError as error:
        raise refuse(str(error)) from error
    if not 0 < fault.probability <= 1 or not 1 <= fault.period <= _MOST or not 0 <= (fault.rank or 0) <= _MOST:
        raise refuse(
            f"rank must be 0 or more, p above 0 and at most 1, period 1 or more, and rank and period at most {_MOST}"
        )
    return fault


def _size(text: str) -> tuple[float, int]:
    if text.endswith("%"):
        share = float(text[:-1]) / 100
        if not 0 < share <= _MAX_SHARE:
            raise ValueError(f"size {text} is not a share above 0 and up to {_MAX_SHARE:.0%}")
        return share, 0
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"size {text!r} is neither a share like 30% nor a time like 20ms")
    pause_ns = float(match.group(1)) * _UNITS_NS[match.group(2)]
    if pause_ns > _MAX_PAUSE_S * NS_PER_S:
        raise ValueError(f"size {text} is more than {_MAX_PAUSE_S} s")
    return 0.0, round(pause_ns)


def spin(duration_s: float) -> None:
    """Use up processor time of this thread."""
    end_ns = time.thread_time_ns() + round(duration_s * NS_PER_S)
    while time.thread_time_ns() < end_ns:
        pass


class Injector:
    """Slows this rank as its faults say.

    Args:
        faults: all faults of the run; those of other ranks are left out.
        seed: the run's seed.
        rank: this rank.
        host: this rank's host name.
        clock: time of the work done so far, nanoseconds; its differences are what shares are taken of.
        spend: makes `clock` advance by a number of seconds.
        sleep: replaced in tests.
    """

    def __init__(
        self,
        faults: Iterable[InjectedFault],
        *,
        seed: int,
        rank: int,
        host: str,
        clock: Callable[[], int] = time.thread_time_ns,
        spend: Callable[[float], None] = spin,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._faults = [fault for fault in faults if fault.concerns(rank, host)]
        self._seed, self._rank = seed, rank
        self._clock, self._spend, self._sleep = clock, spend, sleep
        self._shares: dict[str, float] = {}
        self._pauses: list[InjectedFault] = []
        self._debt_ns = 0

    def begin_step(self, step: int) -> None:
        """Set what is slowed in this step."""
        acting = [fault for fault in self._faults if fault.acts(step, seed=self._seed, rank=self._rank)]
        self._shares = {p: sum(f.share for f in acting if p in f.phases) for p in ("forward", "backward", "data")}
        self._pauses = [fault for fault in acting if fault.pause_ns]

    def attach(self, pieces: Iterable[Any]) -> None:
        """Slow the forward and backward passes of these torch modules, if this rank is slowed there at all."""
        phases = {phase for fault in self._faults for phase in fault.phases}
        for piece in pieces:
            for phase, passes in (("forward", "forward"), ("backward", "full_backward")):
                if phase in phases:
                    before, after = self._hooks(phase)
                    getattr(piece, f"register_{passes}_pre_hook")(before)
                    getattr(piece, f"register_{passes}_hook")(after)

    @contextmanager
    def slowed(self, phase: str) -> Iterator[None]:
        """Slow what is done inside."""
        begin_ns = self._clock()
        yield
        self._slow(phase, begin_ns)

    def _hooks(self, phase: str) -> tuple[Callable[..., None], Callable[..., None]]:
        begin_ns = 0

        def before(*_: Any) -> None:
            nonlocal begin_ns
            begin_ns = self._clock()

        def after(*_: Any) -> None:
            self._slow(phase, begin_ns)

        return before, after

    def _slow(self, phase: str, begin_ns: int) -> None:
        if not self._shares.get(phase) and not self._pauses:
            return
        self._debt_ns += round(self._shares.get(phase, 0.0) * (self._clock() - begin_ns))
        # What one delay takes too long, the next ones take less: over a step the size is met.
        if self._debt_ns > 0:
            before_ns = self._clock()
            self._spend(self._debt_ns / NS_PER_S)
            self._debt_ns -= self._clock() - before_ns
        due = [fault for fault in self._pauses if phase in fault.phases]
        self._pauses = [fault for fault in self._pauses if fault not in due]
        for fault in due:
            self._sleep(fault.pause_ns / NS_PER_S)
