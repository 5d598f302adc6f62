"""What a probe consists of: parts that measure one thing each, one after the other, within a common time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from hpcpace.probe.record import ProbeRecord
from hpcpace.probe.world import ProbeWorld, nobody_listens
from hpcpace.world.deadline import Deadline

Tell = Callable[[int, int], None]
"""Takes what is done and the total."""


class Part(Protocol):
    """One thing that a probe measures."""

    @property
    def name(self) -> str:
        """A word, which `--only` takes."""

    @property
    def weight(self) -> float:
        """Its share of the time, relative to the other parts."""

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        """Measure, and return the record with what was found.

        Collective: every rank alive calls this; rank 0 returns the record with the results, the others what they were
        given. Failures of an operation, or ranks that are lost, become sentences of `world.problems` by `world.meet`.

        Args:
            world: the ranks.
            deadline: when to be done, the same for all ranks within their start; no operation may begin later.
            record: what was found so far.

        Raises:
            RankZeroLost: rank 0 does not answer any more.
        """


@runtime_checkable
class Concluding(Protocol):
    """A part that computes something when all time is over."""

    def conclude(self, record: ProbeRecord) -> ProbeRecord:
        """Return the record with what follows from what was measured; rank 0 alone calls this."""


_MS_PER_S = 1000

PART_NAMES = ("sweep", "pairs", "noise", "copies")
"""The parts of a probe, in their order."""


def chosen_parts(names: Sequence[str], *, cores_in_turn: bool = False) -> list[Part]:
    """Return the parts with some names, in the order of `PART_NAMES`.

    Args:
        names: of `PART_NAMES`.
        cores_in_turn: whether the noise of a host's cores is measured one core after another.
    """
    from hpcpace.probe.copies import Copies
    from hpcpace.probe.noise import Noise
    from hpcpace.probe.pairs import Pairs
    from hpcpace.probe.sweep import Sweep

    parts: tuple[Part, ...] = (Sweep(), Pairs(), Noise(one_at_a_time=cores_in_turn), Copies())
    known = {part.name: part for part in parts}
    return [known[name] for name in PART_NAMES if name in names]


def measure_parts(
    world: ProbeWorld,
    parts: Sequence[Part],
    record: ProbeRecord,
    *,
    clock: Callable[[], float] = time.monotonic,
    begin_stage: Callable[[str], Tell] | None = None,
) -> ProbeRecord:
    """Run all parts within record.time_s, and return the record with what they found.

    A part that needs less than its share leaves the rest to those behind it.

    Collective: every rank calls this with the same parts.

    Args:
        world: the ranks.
        parts: what to measure.
        record: with the time that all parts may take.
        clock: a monotonic clock, in seconds.
        begin_stage: takes the name of a part, and returns what is told its progress in ms whenever the ranks meet.

    Raises:
        RankZeroLost: rank 0 does not answer any more.
    """
    began_s = clock()
    for number, part in enumerate(parts):
        world.meet(f"the start of {part.name}")
        left_s = record.time_s - (clock() - began_s)
        share = part.weight / sum(one.weight for one in parts[number:])
        part_began_s = clock()
        deadline = Deadline(max(left_s * share, 0.001), clock)
        with _shown(world, part, deadline, begin_stage):
            record = part.measure(world, deadline, record)
        took_s = clock() - part_began_s
        record = dataclasses.replace(record, part_s={**record.part_s, part.name: took_s})
    took_s = clock() - began_s
    for part in parts:
        if world.is_first and isinstance(part, Concluding):
            record = part.conclude(record)
    return dataclasses.replace(
        record,
        took_s=took_s,
        problems=(*record.problems, *world.problems),
        lost_hosts=tuple(world.lost_hosts),
    )


@contextmanager
def _shown(
    world: ProbeWorld, part: Part, deadline: Deadline, begin_stage: Callable[[str], Tell] | None
) -> Iterator[None]:
    """Tell how much of a part's time has passed, at meetings; the noise of cores is measured between two of them."""
    if begin_stage is None:
        yield
        return
    tell, total_ms = begin_stage(part.name), max(int(_MS_PER_S * deadline.timeout_s), 1)
    world.on_meeting = lambda: tell(max(total_ms - int(_MS_PER_S * deadline.left_s), 0), total_ms)
    try:
        yield
    finally:
        world.on_meeting = nobody_listens
        tell(total_ms, total_ms)
