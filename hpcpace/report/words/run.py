"""Thresholds and outcome of a run in words, on a terminal and on the page alike."""

from __future__ import annotations

from dataclasses import asdict

from hpcpace.config import DiagnosisConfig
from hpcpace.core.text import format_bytes
from hpcpace.diagnosis.summary import SLURM_ADDRESS, Summary, Switches

UNKNOWN_WAITS = "waits are not known: operations have no comparable counterpart on every member"
MAY_CHANGE = "verdict and figures may change until it ends"
"""Of a run that still runs."""
_BARRIER = "barrier"  # as summaries name it


def changed_thresholds(summary: Summary) -> list[str]:
    """Return the thresholds of a summary that are not the defaults, with these: `straggler_share 0.1 (0.03)`."""
    usual = asdict(DiagnosisConfig())
    return [
        f"{name} {value:g} ({usual[name]:g})" for name, value in summary.settings.items() if value != usual.get(name)
    ]


def switches_line(switches: Switches) -> str:
    """Return which file the leaf switches of the hosts are from; empty where Slurm told the job, or nobody did."""
    if not switches.num_leaves or switches.source == SLURM_ADDRESS:
        return ""
    noun = "leaf switch" if switches.num_leaves == 1 else "leaf switches"
    return f"{switches.num_leaves} {noun}, by {switches.source}"


def message_size(size_bytes: float, *ops: str) -> str:
    """Return the size of what some kinds of operations sent; `?` where none is recorded, but of barriers."""
    return format_bytes(size_bytes) if size_bytes or set(ops) <= {_BARRIER} else "?"


def outcome_line(summary: Summary) -> str:
    """Return how a training ended, its type of numbers and the most memory of a rank; empty if nothing is known."""
    parts = [summary.outcome] if summary.outcome else []
    parts += [f"computed in {summary.dtype}"] if summary.dtype else []
    on_device = max(summary.memory, key=lambda row: row.device_bytes, default=None)
    on_host = max(summary.memory, key=lambda row: row.rss_bytes, default=None)
    if on_device is not None and on_device.device_bytes:
        parts.append(f"at most {format_bytes(on_device.device_bytes)} of GPU memory (rank {on_device.rank})")
    if on_host is not None:
        parts.append(f"at most {format_bytes(on_host.rss_bytes)} of memory (rank {on_host.rank})")
    return ", ".join(parts)
