"""A cluster that `hpcpace lab up` boots on this machine: the settings of `[lab]`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hpcpace.core.config import Bounds, Section, check_size, number
from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.core.text import parse_rate, shown

# Below this, Slurm's own messages time out; above it, the kernel's token bucket no longer limits anything.
_MIN_RATE_BPS, _MAX_RATE_BPS = 64_000, 400_000_000_000


def check_lab_name(name: str) -> None:
    """Refuse a name that a lab cannot have; it becomes the name of a folder.

    Raises:
        ConfigError: the name is invalid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", name):
        raise ConfigError(f"lab.name is {shown(name)}: use up to 20 of a-z, 0-9 and '-', a letter first")


def _check_rate(name: str, text: str) -> None:
    try:
        rate_bps = parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"lab.{name}: {error}") from error
    if not _MIN_RATE_BPS <= rate_bps <= _MAX_RATE_BPS:
        raise ConfigError(f"lab.{name} is {text}: it must be from 64kbit to 400gbit")


@dataclass(frozen=True, kw_only=True)
class LabConfig(Section, section="lab"):
    """A cluster that `hpcpace lab up` boots on this machine."""

    name: str = "lab"
    """Name of the lab; several can be up side by side on one machine."""
    hosts: int = number(4, 1, 250)
    """Number of hosts: n1, n2, ..."""
    leaves: int = number(2, 1, 250)
    """Number of leaf switches; each gets a block of consecutive hosts."""
    link: str = "1gbit"
    """Rate of each host's link to its leaf, in each direction."""
    uplink: str = "500mbit"
    """Rate of each leaf's link to the spine, in each direction."""
    mtu: int = number(1500, 576, 65535)
    """Largest packet of all links, in bytes."""
    cpus_per_host: int = number(4, 1, 1024)
    """CPUs that each host claims in Slurm, whatever the machine has."""
    cpu_quota: float | None = number(None, 0.05)
    """Cores' worth of processor time that each host gets at most; by default unlimited."""
    tmp_size: str = "256MiB"
    """Size of each host's own /tmp, in memory."""
    clock_step_s: int = number(1000, 0, 1_000_000)
    """Seconds by which the clock of n1 is ahead of the machine's; that of n2 is ahead by twice this, and so on."""
    share: tuple[str, ...] = ()
    """Folders below /tmp that all hosts see, too."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of name, bounds, rates and sizes."""
        yield partial(check_lab_name, self.name)
        yield from super().checks()
        yield partial(_check_rate, "link", self.link)
        yield partial(_check_rate, "uplink", self.uplink)
        yield partial(check_size, "lab", "tmp_size", self.tmp_size)

    def bounds_of(self, field: dataclasses.Field[Any]) -> Bounds:
        """Return the bounds of a setting; there are at most as many leaves as hosts."""
        least, most = super().bounds_of(field)
        return (least, self.hosts) if field.name == "leaves" and least <= self.hosts <= most else (least, most)
