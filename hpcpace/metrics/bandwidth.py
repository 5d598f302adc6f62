"""Bandwidths of operations as nccl-tests has them: of their algorithm, and of the bus that carries it.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import numpy as np

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics import Bytes, Floats, Ints
from hpcpace.trace.schema import Op

_ROUNDS = {
    **dict.fromkeys((Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER), 1.0),
    Op.ALL_REDUCE: 2.0,
}
"""How often a rank passes on the parts of all others."""
_NUM_CODES = 256  # format: codes of operations, a byte
_WHOLE = (Op.BROADCAST, Op.REDUCE, Op.SEND, Op.RECV)
"""Operations that pass the whole content over each link once."""


def bus_factors(op: Bytes, num_ranks: Ints) -> Floats:
    """Return bus over algorithm bandwidth, float64, (num_operations,); NaN where there is none, as of a barrier.

    Args:
        op: operations, uint8, (num_operations,).
        num_ranks: members of the group of each, int64, (num_operations,).
    """
    rounds, whole = np.full(_NUM_CODES, np.nan), np.full(_NUM_CODES, np.nan)
    for one, count in _ROUNDS.items():
        rounds[one] = count
    whole[list(_WHOLE)] = 1.0
    parts = (num_ranks - 1) / np.maximum(num_ranks, 1)
    return np.where(np.isfinite(rounds[op]), rounds[op] * parts, whole[op])


def bytes_per_s(size_bytes: Ints, transfer_ns: Floats) -> Floats:
    """Return algorithm bandwidths, float64, (num_operations,); NaN where nothing was sent or the time is not known.

    Args:
        size_bytes: content of each operation, (num_operations,).
        transfer_ns: how long it took once all that it needs had entered, (num_operations,).
    """
    is_known = (size_bytes > 0) & (transfer_ns > 0)
    return np.where(is_known, size_bytes * float(NS_PER_S) / np.where(is_known, transfer_ns, 1.0), np.nan)
