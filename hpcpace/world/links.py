"""What kind of network interface one is, and how fast, from sysfs: names and ioctls alone do not tell.

A cable or a bond of cables comes before a bridge or another virtual interface; InfiniBand says its rate in a place of
its own. An unknown rate is taken for what such links usually have, not for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
_INFINIBAND_TYPE = "32"  # ARPHRD_INFINIBAND of linux/if_arp.h
_USUAL_MBPS = {"infiniband": 100_000, "ethernet": 10_000, "virtual": 10_000, "bridge": 10_000}
_PREFERENCE = {"infiniband": 2, "ethernet": 2, "virtual": 1, "bridge": 0}
_MOST_STACKED = 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """One network interface.

    Attributes:
        kind: `infiniband` or `ethernet` for a cable or what is stacked on one (bond, VLAN), `bridge`, or `virtual`.
        speed_mbps: its rate; 0 if unknown.
        cables: the interfaces at the bottom of what it is stacked on; itself if on none.
    """

    kind: str = "virtual"
    speed_mbps: int = 0
    cables: tuple[str, ...] = ()

    @property
    def preference(self) -> int:
        """How much rather than others it carries training, the larger the rather."""
        return _PREFERENCE[self.kind]

    @property
    def expected_mbps(self) -> int:
        """Its rate, or the usual one of its kind."""
        return self.speed_mbps if self.speed_mbps > 0 else _USUAL_MBPS[self.kind]


def read_link(name: str, speed_mbps: int, sys: Path = SYS) -> Link:
    """Return what sysfs says of an interface.

    Args:
        name: of the interface.
        speed_mbps: what the kernel says of its speed, 0 if unknown.
        sys: where sysfs is.
    """
    folder = sys / "class/net" / name
    cables = tuple(sorted(set(_cables(folder))))
    kinds = {_kind_of_cable(sys / "class/net" / cable) for cable in cables}
    if (folder / "bridge").exists():
        kind = "bridge"
    elif _text(folder / "type") == _INFINIBAND_TYPE or kinds == {"infiniband"}:
        kind = "infiniband"
    else:
        kind = "ethernet" if kinds - {"virtual"} else "virtual"
    if kind == "infiniband" and speed_mbps <= 0:
        speed_mbps = sum(_infiniband_mbps(sys / "class/net" / cable) for cable in cables)
    return Link(kind=kind, speed_mbps=speed_mbps, cables=cables)


def has_active_rdma(sys: Path = SYS) -> bool:
    """Return whether InfiniBand or RoCE is up on this host, over which NCCL then sends by itself."""
    states = (sys / "class/infiniband").glob("*/ports/*/state")
    return any(_text(state).startswith("4") for state in states)  # 4: ACTIVE


def _kind_of_cable(folder: Path) -> str:
    if _text(folder / "type") == _INFINIBAND_TYPE:
        return "infiniband"
    return "ethernet" if (folder / "device").exists() else "virtual"


def _cables(folder: Path, depth: int = 0) -> Iterator[str]:
    below = sorted(folder.glob("lower_*"))
    if not below or depth == _MOST_STACKED:
        yield folder.name
    for link in below:
        yield from _cables(folder.with_name(link.name.removeprefix("lower_")), depth + 1)


def _infiniband_mbps(folder: Path) -> int:
    """Return the rate of the adapter's port behind an interface: `200 Gb/sec (4X HDR)` is 200,000."""
    port = _text(folder / "dev_port")
    wanted = str(int(port) + 1) if port.isdecimal() else "1"
    rates = (_text(rate) for rate in (folder / "device/infiniband").glob(f"*/ports/{wanted}/rate"))
    return max((round(1000 * _number(rate)) for rate in rates), default=0)


def _number(rate: str) -> float:
    try:
        return float(rate.split()[0])
    except (IndexError, ValueError):
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
