"""What compression makes of a bucket of gradients, in numbers; nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

INT8_BLOCK = 256
"""Elements with a scale of their own, as in Dettmers et al. 2022 (block-wise quantization)."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
"""Rank of PowerSGD's matrices, the largest of the paper's (Vogels et al. 2019, table 3)."""
POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP makes its buckets anew after the first step, which torch's hook cannot follow."""
_LEAST_SAVING = 2
"""torch's min_compression_rate: a matrix that would not shrink to a half is sent as it is."""


def int8_message_bytes(num_elements: int, num_ranks: int) -> int:
    """Return the bytes that stand for a bucket in 8 bits: of what each replica sends, and of what each gets."""
    num_blocks = -(-num_elements // (num_ranks * INT8_BLOCK)) * num_ranks
    return num_blocks * (INT8_BLOCK + SCALE_BYTES)


def powersgd_elements(shapes: Iterable[tuple[int, ...]]) -> tuple[int, int, int]:
    """Return the elements that PowerSGD sends of gradients: those sent as they are, of all P, and of all Q.

    A gradient of n x m becomes P of n x r and Q of m x r, if that is less than half of it (Vogels et al. 2019).
    """
    plain, left, right = 0, 0, 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, POWERSGD_RANK)
        if (rows + columns) * rank * _LEAST_SAVING < rows * columns:
            left, right = left + rows * rank, right + columns * rank
        else:
            plain += rows * columns
    return plain, left, right
