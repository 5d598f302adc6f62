"""Hosts on which ranks wait for cores, in words, on a terminal and on the page alike."""

from __future__ import annotations

from hpcpace.core.text import percent
from hpcpace.diagnosis.summary import HostCores

CORE_HEAD = ("host", "ranks", "CPUs", "threads running", "or ready", "waiting", "CPU pressure", "throttled")


def core_cells(row: HostCores) -> tuple[str, ...]:
    """Return the cells of a host, below `CORE_HEAD`."""
    counts = (str(row.num_ranks), str(row.num_cpus) if row.num_cpus else "not known")
    shares = (percent(share) for share in (row.waiting, row.pressure, row.throttled))
    return (row.host, *counts, f"{row.running:.1f}", f"{row.ready:.1f}", *shares)
