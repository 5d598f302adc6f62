"""The jobs of the experiment: layouts of training, and faults of links with what is right to say about them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from hpcpace.core.config import LabConfig

LINK, UPLINK = "200mbit", "200mbit"
"""A ring passes an uplink once in each direction, so uplinks are not its bottleneck."""
COMPUTE_MS = 60
LAYOUTS = {
    "dp": ("--mesh", "dp={ranks}", "--seq-len", "32", "--batch-size", "{two_each}"),
    "zero": ("--mesh", "dp={ranks}", "--zero", "3", "--seq-len", "32", "--batch-size", "{two_each}"),
    "dp x pp": ("--mesh", "dp={half},pp=2", "--seq-len", "32", "--batch-size", "{two_each}"),
    # Messages of 1 MiB take 40 ms, as long as an acknowledgement may be delayed: of shorter ones, nothing is told.
    "pp": ("--mesh", "pp={ranks}", "--seq-len", "128", "--batch-size", "64"),
}
SIZES = ((4, 2), (8, 4))
"""Hosts and leaves."""
_MOST_STAGES = 4  # the preset has as many layers
CASES = ("healthy", "full", "slow host", "slow uplink", "traffic", "loss", "flapping", "mtu")
NOTHING = ("healthy", "full")


@dataclass(frozen=True, kw_only=True)
class LinkJob:
    """One job of the experiment.

    Attributes:
        case: a name of CASES.
        layout: a key of LAYOUTS.
        num_hosts, num_leaves: the lab.
        repetition: counts jobs of one case, layout and size.
    """

    case: str
    layout: str
    num_hosts: int
    num_leaves: int
    repetition: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        words = f"{self.case} {self.layout} {self.num_hosts} {self.repetition}"
        return words.replace(" ", "-")

    @property
    def _random(self) -> random.Random:
        return random.Random(self.name)

    @property
    def host(self) -> str:
        """The host whose link the fault hits."""
        return f"n{self._random.randint(1, self.num_hosts)}"

    @property
    def leaf(self) -> str:
        """The leaf whose uplink it hits."""
        return f"leaf{self._random.randint(1, self.num_leaves)}"

    @property
    def peer(self) -> str:
        """The host to which foreign traffic goes, on the next leaf."""
        number = (int(self.host[1:]) - 1 + self.num_hosts // self.num_leaves) % self.num_hosts + 1
        return f"n{number}"

    @property
    def fault(self) -> tuple[str, ...]:
        """Words of `hpcpace lab fault`; none without one."""
        return {
            "slow host": ("slow-link", self.host, "--rate", "60mbit"),
            "slow uplink": ("slow-link", self.leaf, "--rate", "50mbit"),
            "traffic": ("traffic", self.host, self.peer, "--rate", "80mbit"),
            "loss": ("loss", self.host, "--share", "0.01"),
            "flapping": ("flap-link", self.host, "--period", "4", "--down", "0.5"),
            "mtu": ("mtu", self.host, "--size", "1000"),
        }.get(self.case, ())

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that it is right to name."""
        if self.case in NOTHING:
            return ()
        if self.case == "slow uplink":
            return (f"{self.leaf} uplink",)
        if self.case == "traffic":
            leaves = ((int(host[1:]) - 1) * self.num_leaves // self.num_hosts + 1 for host in (self.host, self.peer))
            return (self.host, self.peer, *(f"leaf{leaf} uplink" for leaf in leaves))
        return (self.host,)

    @property
    def training(self) -> tuple[str, ...]:
        """Options of `hpcpace train gpt2`."""
        numbers = {"ranks": self.num_hosts, "half": self.num_hosts // 2, "two_each": 2 * self.num_hosts}
        layout = (word.format(**numbers) for word in LAYOUTS[self.layout])
        sleeps = (f"host=n{number + 1},phase=forward,size={COMPUTE_MS}ms" for number in range(self.num_hosts))
        work = [word for spec in sleeps for word in ("--inject", spec)] if self.case != "full" else []
        steps = {"slow host": 25, "slow uplink": 30, "flapping": 60 if self.layout == "dp" else 100}.get(self.case, 45)
        steps = min(steps, 30) if self.layout == "pp" else steps  # they take twice as long
        return (*layout, "--steps", str(steps), *work)


def lab_config(num_hosts: int, num_leaves: int) -> LabConfig:
    """Return the settings of the lab of a size."""
    return LabConfig(
        name=f"links{num_hosts}", hosts=num_hosts, leaves=num_leaves, link=LINK, uplink=UPLINK, tmp_size="32MiB"
    )


def jobs(num_repetitions: int) -> Iterator[LinkJob]:
    """Yield all jobs, every case and layout once before any a second time; healthy ones three times as often."""
    for repetition in range(num_repetitions):
        for num_hosts, num_leaves in SIZES:
            for layout in LAYOUTS:
                if layout == "pp" and num_hosts > _MOST_STAGES:
                    continue
                for case in CASES:
                    for part in range(3 if case == "healthy" else 1):
                        number = repetition * (3 if case == "healthy" else 1) + part
                        yield LinkJob(
                            case=case, layout=layout, num_hosts=num_hosts, num_leaves=num_leaves, repetition=number
                        )
