"""What a report says of a probe: what the transfers of the run took, next to what they took in the probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProbedRow:
    """Operations of one kind and size, over groups that are alike.

    Attributes:
        op: name of the operation.
        num_nodes, num_ranks: of each group.
        size_bytes: content of one operation.
        num_groups: groups that did it.
        transfer_ns: median over steps of the mean transfer of an operation, the mean over the groups.
        probed_ns: what it takes by the law of the probe.
        achieved: probed_ns over transfer_ns, the share of the probed rate.
        is_beyond: whether the size is larger than any that was probed.
    """

    op: str
    num_nodes: int
    num_ranks: int
    size_bytes: int
    num_groups: int
    transfer_ns: float
    probed_ns: float
    achieved: float
    is_beyond: bool


@dataclass(frozen=True, kw_only=True)
class ProbedFigures:
    """A run next to a probe of its hosts.

    Attributes:
        source: the file of the probe.
        probed_unix_ns: when it was taken.
        refused: why it is not used, such as a probe of other hosts; empty if it is.
        achieved: of all rows together, probed time over transfer; None without rows.
        rows: the operations with the most transfer first.
        num_unprobed: kinds of operations that the probe did not measure.
    """

    source: str
    probed_unix_ns: int
    refused: str
    achieved: float | None
    rows: tuple[ProbedRow, ...]
    num_unprobed: int
