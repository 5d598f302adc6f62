"""How fast a GPU copies from and to the memory of each NUMA node that its rank may use, pinned and not.

Not run on a GPU so far. Pinned memory is copied by the device itself, other memory through a buffer of the driver.
Durations are those of events on the device's stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpace.audit.snapshot import take_host
from hpcpace.audit.tree import Tree
from hpcpace.probe.limits import pcie_rate
from hpcpace.units import NS_PER_MS, NS_PER_S
from hpcpace.world.deadline import in_time

if TYPE_CHECKING:
    import torch

_COPY_BYTES = 64 << 20
_NUM_WARM_UPS, _NUM_COPIES = 2, 5
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class OwnDeviceRate:
    """What the device of this rank reached; attributes as of `DeviceRate`."""

    device: int
    bus_id: str
    numa_node: int
    is_pinned: bool
    to_device: float
    from_device: float
    limit: float | None


def device_rates(device: torch.device, numa_of_cpu: Mapping[int, int]) -> list[OwnDeviceRate]:
    """Return the rates of copies between a GPU and the memory of each NUMA node on whose cores this rank may run.

    Args:
        device: of type cuda.
        numa_of_cpu: node of each core; 0 for those not listed.

    Raises:
        RuntimeError: torch's, such as no memory left on the device.
    """
    bus_id = pci_address(device)
    limit = _limit(bus_id) if bus_id else None
    cpus_of_node: dict[int, set[int]] = {}
    for cpu in os.sched_getaffinity(0):
        cpus_of_node.setdefault(numa_of_cpu.get(cpu, 0), set()).add(cpu)
    return [
        OwnDeviceRate(
            device=device.index or 0,
            bus_id=bus_id,
            numa_node=node,
            is_pinned=is_pinned,
            to_device=to_device,
            from_device=from_device,
            limit=limit,
        )
        for node, cpus in sorted(cpus_of_node.items())
        for is_pinned, to_device, from_device in _on_cores(cpus, device)
    ]


def pci_address(device: torch.device) -> str:
    """Return the address of a GPU as Linux writes it, like `0000:17:00.0`; empty if torch does not say."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _limit(bus_id: str) -> float | None:
    try:
        snapshot = in_time(lambda: take_host(Tree(), host=""), _READ_TIMEOUT_S, "reading /sys")
    except Exception:  # a host whose facts cannot be read can still be measured
        return None
    found = [each for each in snapshot.hardware.pci or () if each.address == bus_id]
    return pcie_rate(found[0]) if found else None


def _on_cores(cpus: set[int], device: torch.device) -> list[tuple[bool, float, float]]:
    """Return the rates in a thread bound to some cores, where memory that it touches first belongs to their node."""
    found: list[tuple[bool, float, float]] = []
    failed: list[RuntimeError] = []

    def copy() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            found.extend(_rates(device))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=copy, name="hpcpace-device-copy")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found


def _rates(device: torch.device) -> Iterator[tuple[bool, float, float]]:
    import torch

    with torch.cuda.device(device):
        on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        for is_pinned in (True, False):
            on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            on_host.fill_(1)
            yield is_pinned, _rate(on_device, on_host), _rate(on_host, on_device)


def _rate(target: Any, source: Any) -> float:
    """Return the median rate of copies, bytes per second."""
    import torch

    times_ns = []
    for _ in range(_NUM_WARM_UPS + _NUM_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times_ns.append(begin.elapsed_time(end) * NS_PER_MS)
    usual_ns = sorted(times_ns[_NUM_WARM_UPS:])[_NUM_COPIES // 2]
    return float(target.numel() * NS_PER_S / usual_ns)
