"""Which link of the lab is slowed before each measurement, and whether the probe named it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

HOSTS, LEAVES = 8, 4
LINK_MBIT, UPLINK_MBIT = 400, 600
# Of a segment of 1,514 bytes on the wire, as the lab's shapers count, 1,448 are data.
DATA_SHARE = 1448 / 1514
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.7


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
        kind: `healthy`, `host link` or `uplink`.
        link: name of the link in the lab, like `n3` or `leaf2`; empty for none.
        rate_mbit: to which it was slowed.
        named: what the probe named as slow, `or` between what it could not separate.
        measured_mbit: rate of data of the slow link, or the usual one of hosts' links.
        latency_us: median half round trip between n1 and n2.
        load: load average of the machine, over a minute.
    """

    kind: str
    link: str
    rate_mbit: float
    named: tuple[str, ...] = ()
    measured_mbit: float = 0.0
    latency_us: float = 0.0
    load: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the probe named the slow link alone, or nothing where there is none."""
        return self.named == ((self.target,) if self.link else ())

    @property
    def target(self) -> str:
        """The link as the probe names it."""
        return f"{self.link} uplink" if self.kind == "uplink" else self.link

    @property
    def error(self) -> float:
        """Rate measured by the rate of data that the shaper allows, minus 1."""
        return self.measured_mbit / (self.rate_mbit * DATA_SHARE) - 1


def planned(num_slow: int, num_healthy: int, seed: int) -> list[Case]:
    """Return the cases in random order: hosts and switches in turn, at random rates of 10 to 70 % of the usual."""
    random = np.random.default_rng(seed)
    cases = [Case(kind="healthy", link="", rate_mbit=LINK_MBIT) for _ in range(num_healthy)]
    for kind, units, usual in (("host link", HOSTS, LINK_MBIT), ("uplink", LEAVES, UPLINK_MBIT)):
        name = "n" if kind == "host link" else "leaf"
        shares = random.uniform(_LEAST_SHARE, _MOST_SHARE, num_slow)
        cases += [
            Case(kind=kind, link=f"{name}{number % units + 1}", rate_mbit=round(usual * float(share)))
            for number, share in enumerate(shares)
        ]
    return [cases[number] for number in random.permutation(len(cases))]


def judged(case: Case, pairs: Mapping[str, Any], load: float) -> Case:
    """Return a case with what the probe found."""
    findings = pairs["findings"]
    rates = [found["value"] for found in findings if found["measure"] != "latency" and case.target in found["names"]]
    return Case(
        kind=case.kind,
        link=case.link,
        rate_mbit=case.rate_mbit,
        named=tuple(" or ".join(found["names"]) for found in findings),
        measured_mbit=8e-6 * (rates[0] if rates else pairs["usual"]),
        latency_us=min(1e-3 * row["p50_ns"] for row in pairs["rows"] if {row["first"], row["second"]} == {"n1", "n2"}),
        load=load,
    )
