"""The connections in an NCCL_DEBUG=INFO log; rule C02 compares their transports with what the nodes have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpcpace.errors import UsageError

_EDGE = re.compile(
    rb"Channel \d+(?:/\d+)? : (\d{1,7})\[[0-9a-fx]+\] -> (\d{1,7})\[[0-9a-fx]+\] "
    rb"(?:\[(?:send|receive)\] )?via ([A-Za-z0-9/_]+)"
)
_MOST_LINE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """The connections of a log, each pair of ranks and transport once.

    Attributes:
        edges: (sender, receiver, transport), with transports like `P2P/CUMEM`, `SHM/direct/direct`, `NET/IB/0/GDRDMA`.
    """

    edges: frozenset[tuple[int, int, str]]


def read_nccl_log(path: Path) -> NcclLog:
    """Return the connections in a log.

    Raises:
        UsageError: it cannot be read, or has no connections.
    """
    edges = set()
    try:
        with path.open("rb") as stream:
            while line := stream.readline(_MOST_LINE_BYTES):
                found = _EDGE.search(line)
                if found:
                    edges.add((int(found[1]), int(found[2]), found[3].decode("ascii")))
    except OSError as error:
        raise UsageError(f"cannot read the NCCL log {path}: {error.strerror}") from error
    if not edges:
        raise UsageError(f"{path} has no line like `Channel 00/0 : 0[0] -> 1[1] via P2P`: log with NCCL_DEBUG=INFO")
    return NcclLog(edges=frozenset(edges))
