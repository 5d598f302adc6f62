"""The steps of a run: those that all ranks have, how long each took, and which of them a figure uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.metrics import Bools, Bytes, Ints
from hpcpace.trace.schema import StepFlag

_MAX_LENGTH_PER_STEP = 64  # memory: of a lookup table, for each step
_PERCENTILES = (50, 95, 99)  # display: of the step time


@dataclass(frozen=True, kw_only=True)
class StepPanel:
    """The steps that all ranks have, in order of their number.

    Attributes:
        step: step numbers, int64, (num_steps,).
        begin_ns: begin on each rank's own clock, int64, (num_ranks, num_steps).
        end_ns: end on each rank's own clock, int64, (num_ranks, num_steps).
        samples: samples of the global batch, int64, (num_steps,).
        flags: marks set by any rank, uint8, (num_steps,).
        num_seen: steps that at least one rank has.
    """

    step: Ints
    begin_ns: Ints
    end_ns: Ints
    samples: Ints
    flags: Bytes
    num_seen: int

    def __len__(self) -> int:
        return len(self.step)

    def select(self, mask: Bools | Ints | slice) -> StepPanel:
        """Return the steps under a mask, bool, (num_steps,), at some positions, int64, or of a slice."""
        return StepPanel(
            step=self.step[mask],
            begin_ns=self.begin_ns[:, mask],
            end_ns=self.end_ns[:, mask],
            samples=self.samples[mask],
            flags=self.flags[mask],
            num_seen=self.num_seen,
        )


def common_steps(tables: Sequence[Mapping[str, NDArray[Any]]]) -> StepPanel:
    """Return the steps that every rank has.

    Rows that end before they begin are left out. If a rank has a step number twice, its first row counts.

    Args:
        tables: the `steps` table of each rank.
    """
    numbers, rows = [], []
    for table in tables:
        valid = np.flatnonzero(table["end_ns"] >= table["begin_ns"])
        unique, first = np.unique(np.asarray(table["step"], np.int64)[valid], return_index=True)
        numbers.append(unique)
        rows.append(valid[first])
    empty = np.zeros(0, np.int64)
    common = reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), numbers) if numbers else empty
    picked = [row[np.searchsorted(number, common)] for number, row in zip(numbers, rows, strict=True)]

    def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        columns = [np.asarray(table[name], dtype)[row] for table, row in zip(tables, picked, strict=True)]
        return np.array(columns, dtype).reshape(len(tables), len(common))

    return StepPanel(
        step=common,
        begin_ns=column("begin_ns", np.int64),
        end_ns=column("end_ns", np.int64),
        samples=column("samples", np.int64).sum(axis=0),
        flags=np.bitwise_or.reduce(column("flags", np.uint8), axis=0),
        num_seen=len(np.unique(np.concatenate([empty, *numbers]))),
    )


def columns_of(step: Ints, values: Ints) -> Ints:
    """Return the position of each value among step numbers, -1 if it is not one of them, int64, shaped like `values`.

    Args:
        step: step numbers, ascending and unique, (num_steps,).
        values: numbers of steps, of any shape.
    """
    if not len(step):
        return np.full(values.shape, -1)
    first, length = int(step[0]), int(step[-1] - step[0]) + 1
    if length > _MAX_LENGTH_PER_STEP * len(step):
        column = np.searchsorted(step, values).clip(max=len(step) - 1)
        return np.where(step[column] == values, column, -1)
    # A lookup table is several times faster than np.isin or np.searchsorted; values outside are clipped to its ends.
    table = np.full(length + 2, -1)
    table[step - first + 1] = np.arange(len(step))
    return np.asarray(table[np.clip(values, first - 1, first + length) - (first - 1)])


def step_times(step: Ints, begin_ns: Ints, end_ns: Ints) -> Ints:
    """Return the wall time of each step, T_i = max_r end_i - max_r end_(i-1), in nanoseconds, (num_steps,).

    So steps add up to wall time. If step i-1 is missing, the latest begin of step i is used instead of its end.

    Args:
        step: step numbers, ascending, (num_steps,).
        begin_ns: begin on the common clock, (num_ranks, num_steps).
        end_ns: end on the common clock, (num_ranks, num_steps).
    """
    if not len(step):
        return np.zeros(0, np.int64)
    last_end = end_ns.max(axis=0)
    start = begin_ns.max(axis=0)
    follows = np.flatnonzero(np.diff(step) == 1) + 1
    start[follows] = last_end[follows - 1]
    return np.asarray(np.maximum(last_end - start, 0))


def used_steps(panel: StepPanel, *, include_warmup: bool, first: int | None = None, stop: int | None = None) -> Bools:
    """Return which steps of a panel the figures use, bool, (num_steps,): not the warm-up, `first <= step < stop`.

    Steps without detail are left out, and those without phases where there are others.
    """
    mask = ~is_plain(panel.flags)
    if not include_warmup:
        mask &= ~is_warmup(panel.flags)
    if first is not None:
        mask &= panel.step >= first
    if stop is not None:
        mask &= panel.step < stop
    has_phases = mask & ~is_unphased(panel.flags)
    return has_phases if has_phases.any() else mask


def is_plain(flags: Bytes) -> Bools:
    """Return which steps were recorded without detail on some rank, bool, (num_steps,)."""
    return np.asarray(flags & StepFlag.PLAIN != 0)


def is_unphased(flags: Bytes) -> Bools:
    """Return which steps were recorded with collectives and without phases on some rank, bool, (num_steps,)."""
    return np.asarray(flags & (StepFlag.PLAIN | StepFlag.UNPHASED) == StepFlag.UNPHASED)


def is_warmup(flags: Bytes) -> Bools:
    """Return which steps are a warm-up, bool, (num_steps,); those with less than full detail have its mark, too."""
    return np.asarray(flags & (StepFlag.WARMUP | StepFlag.PLAIN | StepFlag.UNPHASED) == StepFlag.WARMUP)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The throughput and step times of a run.

    Attributes:
        wall_ns: sum of the step times.
        samples: samples of all steps.
        samples_per_s: samples over `wall_ns`; None where no samples were credited.
        mean_ns, p50_ns, p95_ns, p99_ns: of the step time.
        cv: coefficient of variation of the step time; None for a single step.
    """

    wall_ns: int
    samples: int
    samples_per_s: float | None
    mean_ns: float
    p50_ns: float
    p95_ns: float
    p99_ns: float
    cv: float | None


def throughput(times_ns: Ints, samples: Ints) -> Throughput:
    """Return the throughput and step times of at least one step.

    Args:
        times_ns: step times, (num_steps,).
        samples: samples of the global batch, (num_steps,).
    """
    wall_ns, num_samples = int(times_ns.sum()), int(samples.sum())
    mean_ns = float(times_ns.mean())
    p50_ns, p95_ns, p99_ns = (float(value) for value in np.percentile(times_ns, _PERCENTILES))
    return Throughput(
        wall_ns=wall_ns,
        samples=num_samples,
        samples_per_s=num_samples / wall_ns * NS_PER_S if num_samples > 0 and wall_ns else None,
        mean_ns=mean_ns,
        p50_ns=p50_ns,
        p95_ns=p95_ns,
        p99_ns=p99_ns,
        cv=float(times_ns.std(ddof=1)) / mean_ns if len(times_ns) > 1 and mean_ns else None,
    )
