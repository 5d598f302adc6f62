"""Which ranks used a device, and whether their times are those of the device.

The host of such a rank issues work and runs ahead of its device, so its phases do not show what takes time there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.encoding import DEVICE_BEGIN_COLUMN, ENQUEUE_COLUMN
from hpcpace.trace.reader import RankTrace, Table

# NCCL and its kin of other vendors (RCCL, HCCL, XCCL) know devices alone. oneCCL, `ccl`, knows hosts, too.
_OF_DEVICES = b"ccl"


def has_device(trace: RankTrace) -> bool:
    """Return whether a rank used a device, as its columns or the backends of its process groups say."""
    has_columns = ENQUEUE_COLUMN in trace.tables["collectives"] or DEVICE_BEGIN_COLUMN in trace.tables["phases"]
    return has_columns or any(_is_of_devices(name) for name in np.unique(trace.tables["groups"]["backend"]).tolist())


def _is_of_devices(backend: bytes) -> bool:
    return backend.endswith(_OF_DEVICES) and backend != _OF_DEVICES


def is_host_timed(trace: RankTrace) -> bool:
    """Return whether a rank used a device and its phases are times of the host."""
    return has_device(trace)


def is_timed_there(trace: RankTrace, operations: Table) -> NDArray[np.bool_]:
    """Return which operations have the times of where they take place, bool, (num_operations,).

    A rank without a device does all on its host. With one, an operation of the host, as over gloo, begins as it is
    issued, while the device may still be busy with what it works on.

    Args:
        trace: the rank's.
        operations: rows of its collectives.
    """
    if ENQUEUE_COLUMN in operations:
        return np.asarray(operations["enter_ns"] != operations[ENQUEUE_COLUMN])
    return np.full(len(operations), not has_device(trace))
