"""The log of truth of a lab: the true state with times, for scoring what hpcpace finds out by itself.

It has one JSON object per line with `event`, `unix_ns` and `monotonic_ns` (the machine's CLOCK_MONOTONIC; a host's
clock is ahead of it by the host's `clock_offset_s`). It is kept in the lab's folder, outside every run directory, and
only the lab's own commands and tests read it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.lab.plan import LabPlan
from hpcpace.redaction import Redaction


@dataclass(frozen=True)
class TruthLog:
    """The log file, to which several processes append."""

    path: Path

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with the current time, secrets redacted."""
        entry = {"event": event, "unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns(), **facts}
        line = json.dumps(Redaction().content(entry), sort_keys=True) + "\n"
        # A single write to a file opened for appending: lines of two processes do not mix.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def write_lab(self, plan: LabPlan) -> None:
        """Append the lab itself: settings, hosts with their clocks, and links."""
        self.write(
            "lab",
            config=dataclasses.asdict(plan.config),
            hosts=[dataclasses.asdict(host) for host in plan.hosts],
            links=[dataclasses.asdict(link) for link in plan.links.values()],
            emulation=plan.emulation,
        )

    def read(self) -> list[dict[str, Any]]:
        """Return all events, the oldest first."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]
