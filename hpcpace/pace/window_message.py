"""What the ranks exchange after each window: one vector, reduced to the minimum of each element.

For every group the minimum and, negated, the maximum of exit - ready in each step: means would hide stragglers that
rotate. It also carries the durations of the steps on rank 0, whether a rank wants to stop or to start afresh, and its
garbage collections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_UNKNOWN = -1.0
_NUM_HEADS = 3


class Status(IntEnum):
    """What a rank asks for; the lowest value over the ranks applies to all."""

    END = -2
    RESET = -1
    GO_ON = 0


@dataclass(frozen=True, kw_only=True)
class WindowMessage:
    """A window of one rank, or, after the exchange, of all of them.

    Attributes:
        status: what the rank asks for.
        num_full: full garbage collections of it so far, in steps without a schedule; the most over the ranks.
        full_ns: their total time; the most over the ranks.
        step_ns: duration of each step on rank 0; NaN if it does not count, and on other ranks.
        least_ns: exit - ready in each step by group, (num_groups, num_steps); NaN if any rank lacks it.
        most_ns: the same, the maximum.
    """

    status: Status
    num_full: int
    full_ns: int
    step_ns: tuple[float, ...]
    least_ns: tuple[tuple[float, ...], ...]
    most_ns: tuple[tuple[float, ...], ...]


def pack(message: WindowMessage, *, group: int, is_first: bool) -> list[float]:
    """Return the vector of one rank.

    Args:
        message: its window; `least_ns` and `most_ns` have one row, its own values.
        group: index of its group, -1 for none.
        is_first: whether it is rank 0, whose durations count.
    """
    num_steps, num_groups = len(message.step_ns), len(message.least_ns)
    values = [float(message.status), -float(message.num_full), -float(message.full_ns)]
    values += [_known(time_ns) if is_first else math.inf for time_ns in message.step_ns]
    for index in range(num_groups):
        if index != group:
            values += [math.inf] * (2 * num_steps)
            continue
        own_ns = message.least_ns[index]
        values += [_known(time_ns) for time_ns in own_ns]
        # A missing value wins the minimum in both halves.
        values += [-time_ns if _is_known(time_ns) else -math.inf for time_ns in own_ns]
    return values


def unpack(values: Sequence[float], *, num_steps: int, num_groups: int) -> WindowMessage:
    """Return the message of all ranks together.

    Raises:
        ValueError: the vector has another length, or no rank gave its status.
    """
    if len(values) != _NUM_HEADS + num_steps * (1 + 2 * num_groups):
        raise ValueError(f"an exchange of {len(values)} values, not of {num_steps} steps and {num_groups} groups")
    rows = [
        tuple(float(value) for value in values[start : start + num_steps])
        for start in range(_NUM_HEADS, len(values), num_steps)
    ]
    return WindowMessage(
        status=Status(int(values[0])),
        num_full=int(-values[1]),
        full_ns=int(-values[2]),
        step_ns=tuple(_or_nan(value) for value in rows[0]),
        least_ns=tuple(tuple(_or_nan(value) for value in row) for row in rows[1::2]),
        most_ns=tuple(tuple(_or_nan(-value) for value in row) for row in rows[2::2]),
    )


def _is_known(time_ns: float) -> bool:
    return math.isfinite(time_ns) and time_ns >= 0


def _known(time_ns: float) -> float:
    return time_ns if _is_known(time_ns) else _UNKNOWN


def _or_nan(value: float) -> float:
    return value if _is_known(value) else math.nan
