"""The layer for devices, forced on over CPU tensors: its events are read from the host's clock."""

from __future__ import annotations

import time
from typing import Any

from hpcpace.observe import recording
from hpcpace.observe.collectives.observer import CollectiveObserver
from hpcpace.observe.collectives.operations import MESSAGES
from hpcpace.observe.device.clock import DeviceClock


class HostEvent:
    """An event of a device that does everything at once, as soon as the host asks for it."""

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def record(self) -> None:
        self.at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return self.at_ns is not None

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Any) -> float:
        assert self.at_ns is not None and end_event.at_ns is not None
        return (end_event.at_ns - self.at_ns) / 1e6


def force_device() -> None:
    """Observe this process as if it had a device."""
    recording.find_device = lambda warn: DeviceClock(HostEvent, warn=warn)
    # Gloo's messages have no future, as those of NCCL have.
    CollectiveObserver._is_on_device = (  # type: ignore[method-assign]
        lambda self, keyset, operator, args: operator.has_work and operator.op not in MESSAGES
    )
