"""Who waits for whom in an operation: all for all, all for the root, the root for all, or a message's two sides.

Rows are selected by comparing bytes, which is ten times faster than a lookup table or `np.isin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import Op

FROM_ROOT = (Op.BROADCAST, Op.SCATTER)
"""The root sends: all others wait for it."""
TO_ROOT = (Op.REDUCE, Op.GATHER)
"""The root receives: it waits for all others."""
MESSAGES = (Op.SEND, Op.RECV)


def is_one_of(op: NDArray[np.uint8], ops: Sequence[Op]) -> NDArray[np.bool_]:
    """Return which operations are one of `ops`, bool, (num_operations,).

    Args:
        op: operations, (num_operations,).
        ops: the ones to find, at least one.
    """
    found: NDArray[np.bool_] = op == ops[0]
    for other in ops[1:]:
        found |= op == other
    return found


def synchronises(op: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which operations no rank leaves before all have entered, bool, (num_operations,)."""
    return ~is_one_of(op, (*FROM_ROOT, *TO_ROOT, *MESSAGES))


def releases_others(op: NDArray[np.uint8], is_root: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows others wait for, bool, (num_operations,); both sides of a message count.

    Args:
        op: operations, (num_operations,).
        is_root: whether the row's rank is the root of the operation, (num_operations,); without meaning where the
            operation has no root.
    """
    return np.where(is_one_of(op, FROM_ROOT), is_root, ~(is_one_of(op, TO_ROOT) & is_root))


def depends_on_others(op: NDArray[np.uint8], is_root: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows wait for others, bool, (num_operations,); arguments as in `releases_others`."""
    return np.where(is_one_of(op, TO_ROOT), is_root, ~(is_one_of(op, FROM_ROOT) & is_root))


@cache
def operation_roles() -> NDArray[np.uint8]:
    """Return what the kernels ask of an operation, not as its root and as its root, uint8, (256, 2).

    1 where others wait for the row, 2 where it waits for others, 4 of a message, 8 where no rank leaves before all have
    entered, 16 where it waits for the last one that others wait for, as all do but senders to a root.
    """
    op, is_root = np.arange(256, dtype=np.uint8)[:, None], np.array([[False, True]])
    roles = releases_others(op, is_root) + 2 * depends_on_others(op, is_root) + 4 * is_one_of(op, MESSAGES)
    roles = roles + 8 * synchronises(op) + 16 * (~is_one_of(op, TO_ROOT) | is_root)
    return np.ascontiguousarray(roles, np.uint8)
