"""Set-ups of a scaling series whose truth is known: what is injected, and which part of the step it must show up in."""

from __future__ import annotations

from dataclasses import dataclass

SIZES, HELD_OUT = (1, 2, 4, 8), (16, 32)
STEP_MS = 80.0
"""Of work on one host."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One series.

    Attributes:
        name: of it.
        part: of `hpcpace.runs.scaling.samples.PARTS` that stops it.
        is_strong: whether the work is divided among the hosts; else each host has all of it.
        serial_share: part of the work that is not divided.
        event_ms, event_share: length of an event, and the share of steps in which a rank has one.
        slow_ms: what the last rank does on top in each step.
        transfer_ms: of an operation over many hosts; `hop_ms` is added for each further one.
        uplink_mbit: rate of the lab's uplinks.
        work_ms: of one host.
    """

    name: str
    part: str
    is_strong: bool = False
    serial_share: float = 0.0
    event_ms: float = 0.0
    event_share: float = 0.0
    slow_ms: float = 0.0
    transfer_ms: float = 1.0
    hop_ms: float = 0.0
    uplink_mbit: int = 10_000
    work_ms: float = STEP_MS

    def host_ms(self, num_hosts: int) -> float:
        """Return the work of a host in a step."""
        if not self.is_strong:
            return self.work_ms
        return self.work_ms * (self.serial_share + (1 - self.serial_share) / num_hosts)


SETUPS = (
    Setup(name="jitter-weak-5", part="jitter", event_ms=40, event_share=0.05),
    Setup(name="jitter-weak-10", part="jitter", event_ms=30, event_share=0.1),
    Setup(name="jitter-weak-20", part="jitter", event_ms=20, event_share=0.2),
    Setup(name="jitter-strong-10", part="jitter", is_strong=True, event_ms=60, event_share=0.1, work_ms=640.0),
    Setup(name="serial-10", part="work", is_strong=True, serial_share=0.1, work_ms=640.0),
    Setup(name="serial-20", part="work", is_strong=True, serial_share=0.2, work_ms=640.0),
    Setup(name="serial-40", part="work", is_strong=True, serial_share=0.4, work_ms=640.0),
    Setup(name="uplink-weak", part="transfer", transfer_ms=40, hop_ms=1.0, uplink_mbit=60),
    Setup(name="uplink-weak-slow", part="transfer", transfer_ms=80, hop_ms=2.0, uplink_mbit=30),
    Setup(name="uplink-strong", part="transfer", is_strong=True, transfer_ms=40, uplink_mbit=60, work_ms=640.0),
    Setup(name="slow-rank-weak", part="imbalance", slow_ms=30),
)
