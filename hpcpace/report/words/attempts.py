"""The attempts of a run in words, on a terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpace.core.text import format_duration, listed, percent, plural, printable
from hpcpace.diagnosis.summary import AttemptRow

_MOST_HOSTS = 4


ATTEMPT_HEAD = ("attempt", "ranks", "hosts", "steps", "first to last", "step p50", "ended")


def attempt_cells(row: AttemptRow) -> tuple[str, ...]:
    """Return what `ATTEMPT_HEAD` names."""
    span = "" if row.first is None else f"{row.first} to {row.last}"
    p50 = "-" if row.p50_ns is None else format_duration(row.p50_ns)
    return (str(row.attempt), str(row.world_size), str(len(row.hosts)), str(row.num_steps), span, p50, ended(row))


def ended(row: AttemptRow) -> str:
    """Return how an attempt ended, as far as its traces show."""
    if not row.num_ranks:
        return "no trace can be read"
    parts = []
    if row.num_not_closed:
        parts.append(f"{row.num_not_closed} of {plural(row.num_ranks, 'trace')} not closed")
    if row.num_inside:
        parts.append(f"{row.num_inside} inside an operation")
    if row.num_ranks < row.world_size:
        parts.append(f"{row.world_size - row.num_ranks} without a trace")
    return ", ".join(parts) or "all traces closed"


def attempts_differ(history: Sequence[AttemptRow], attempt: int) -> str:
    """Return one line on how an attempt differs from the one before it, or from the next one if it is the first."""
    at = [row.attempt for row in history].index(attempt)
    this, other = history[at], history[at - 1 if at else 1]
    who = f"attempt {this.attempt} compared with {other.attempt}"
    if not (this.num_ranks and other.num_ranks):
        return f"{who}: without traces there is nothing to compare"
    parts = [*_world(this, other), *_speed(this, other)]
    return f"{who}: {'; '.join(parts)}"


def _world(this: AttemptRow, other: AttemptRow) -> list[str]:
    parts = []
    if this.world_size != other.world_size:
        parts.append(f"{plural(this.world_size, 'rank')} instead of {other.world_size}")
    if this.mesh != other.mesh:
        parts.append(f"mesh {printable(this.mesh) or 'unknown'} instead of {printable(other.mesh) or 'unknown'}")
    for word, more, fewer in (("with", this, other), ("without", other, this)):
        if hosts := [printable(host) for host in more.hosts if host not in fewer.hosts]:
            some = [f"{len(hosts) - _MOST_HOSTS} more hosts"] if len(hosts) > _MOST_HOSTS else []
            parts.append(f"{word} {listed([*hosts[:_MOST_HOSTS], *some])}")
    return parts or ["the same ranks on the same hosts"]


def _speed(this: AttemptRow, other: AttemptRow) -> list[str]:
    if this.p50_ns is None or not other.p50_ns:
        return ["no steps to compare"]
    change = this.p50_ns / other.p50_ns - 1
    return [f"median step {percent(abs(change))} {'longer' if change > 0 else 'shorter'}"]
