"""The run at a glance: where the time of a step went, its attempts, and what ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hpcpace.core.text import (
    few,
    first_few,
    format_bytes,
    format_count,
    format_duration,
    listed,
    percent,
    plural,
    printable,
)
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import SLURM_ADDRESS, WAIT_OR_TRANSFER, AttemptRow, ExcessThresholds, Summary, Switches
from hpcpace.report.document import NONE, Bar, Cell, Facts, Notes, Part, Row, Section, Table

UNKNOWN_WAITS = "waits are not known: operations have no comparable counterpart on every member"
_MIN_SHOWN = 0.0005  # less is 0.0 %
_MAX_HOSTS, _MAX_NEW_HOSTS, _MAX_EXCESS = 8, 4, 2
_COLORS = {
    "busy": "@busy",
    "exposed wait": "@wait",
    "transfer": "@transfer",
    WAIT_OR_TRANSFER: "@transfer",
    "other": "@other",
}


def time_section(summary: Summary) -> Section:
    """Return where the average step went, or why that is not known, and the figures that people compare runs by."""
    shares, world = summary.shares, summary.world
    hidden = shares.overlap or 0.0
    remark = f"{percent(hidden)} of communication is hidden behind computation" if hidden >= _MIN_SHOWN else ""
    parts = [Part(name, share, _COLORS[name]) for name, share in shares.whole or ()]
    missing = "waits for ranks without a trace count as transfer" if world.missing else ""
    unknown = UNKNOWN_WAITS if shares.exposed_wait is None else ""
    return Section(
        "Where the time went",
        (
            Bar("shares", parts, remark=remark, is_drawn=True),
            Notes([unknown, missing] if parts else [summary.unknown]),
            _speed(summary),
        ),
        lead="mean over ranks and used steps" + "; busy is forward, backward and optimizer" * bool(parts),
    )


def _speed(summary: Summary) -> Facts:
    speed, world = summary.throughput, summary.world
    rate = f"{format_count(speed.samples_per_s)} {world.samples_unit}/s" if speed.samples_per_s else ""
    if rate and world.missing:  # what the missing ranks were credited with is not known
        rate += f" by the {plural(len(world.ranks), 'rank')} with a trace"
    return Facts(
        (
            (Cell("Throughput", "speed"), rate or f"no {world.samples_unit} credited"),
            (Cell("Step time, median", "step p50"), format_duration(speed.p50_ns)),
            (Cell("95th percentile", "p95"), format_duration(speed.p95_ns)),
            (Cell("99th percentile", "p99"), format_duration(speed.p99_ns)),
            (Cell("Variation (CV)", "CV"), f"{speed.cv:.3f}" if speed.cv is not None else ""),
        ),
        is_tiles=True,
    )


def attempts_section(summary: Summary) -> Section:
    """Return all attempts of a run in one table, and how they differ; empty if there is only one."""
    rows = [
        Row(
            (
                str(row.attempt),
                str(row.world_size),
                str(len(row.hosts)),
                str(row.num_steps),
                "" if row.first is None else f"{row.first} to {row.last}",
                NONE if row.p50_ns is None else format_duration(row.p50_ns),
                ended(row),
            ),
            style="strong" if row.attempt == summary.attempt else "",
        )
        for row in summary.history
    ]
    head = ("attempt", "ranks", "hosts", "steps", "first to last", "step p50", "ended")
    differ = attempts_differ(summary.history, summary.attempt) if rows else ""
    return Section(
        "Attempts",
        (Table(head, rows, text=(0, 6)), Notes([differ])),
        lead=f"all other figures are of attempt {summary.attempt}",
    )


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
    parts = _differences(this, other) or ["the same ranks on the same hosts"]
    if this.p50_ns is None or not other.p50_ns:
        return f"{who}: {'; '.join([*parts, 'no steps to compare'])}"
    change = this.p50_ns / other.p50_ns - 1
    return f"{who}: {'; '.join(parts)}; median step {percent(abs(change))} {'longer' if change > 0 else 'shorter'}"


def _differences(this: AttemptRow, other: AttemptRow) -> list[str]:
    parts = []
    if this.world_size != other.world_size:
        parts.append(f"{plural(this.world_size, 'rank')} instead of {other.world_size}")
    if this.mesh != other.mesh:
        parts.append(f"mesh {printable(this.mesh) or 'unknown'} instead of {printable(other.mesh) or 'unknown'}")
    for word, more, fewer in (("with", this, other), ("without", other, this)):
        if hosts := [printable(host) for host in more.hosts if host not in fewer.hosts]:
            parts.append(f"{word} {listed(first_few(hosts, _MAX_NEW_HOSTS, noun='host'))}")
    return parts


def run_section(summary: Summary, versions: Sequence[tuple[str, str]] = ()) -> Section:
    """Return what ran, which steps the figures use, and what tracing cost.

    Args:
        summary: the figures.
        versions: names and versions of what ran, and of what writes the report.
    """
    world, tracing, names = summary.world, summary.tracing, summary.world.hosts
    attempts = f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else ""
    missing = f" ({len(world.missing)} without a trace)" if world.missing else ""
    hosts = few(names, _MAX_HOSTS)
    mesh = f", mesh {world.mesh}" if world.mesh else ""
    share = "unknown share" if tracing.overhead_share is None else f"{100 * tracing.overhead_share:.2g} %"
    changed = changed_thresholds(summary)
    return Section(
        "This run",
        (
            Facts(
                (
                    ("run", f"{summary.run_id}, attempt {summary.attempt}{attempts}"),
                    ("world", f"{plural(world.world_size, 'rank')}{missing} on {plural(len(names), 'host')}{mesh}"),
                    ("hosts", hosts),
                    ("steps", _steps(summary)),
                    ("found", "; ".join(summary.steps.sources)),
                    ("training", outcome_line(summary)),
                    ("excess", _excess(summary)),
                    ("thresholds", f"changed from the defaults: {', '.join(changed)}" if changed else ""),
                    ("switches", switches_line(summary.switches)),
                    (
                        "tracing",
                        f"{share} of the time, {format_bytes(tracing.size_bytes)} on disk, "
                        f"{plural(tracing.num_events, 'event')}, {tracing.num_dropped} dropped",
                    ),
                    ("versions", ", ".join(f"{name} {version}" for name, version in versions)),
                )
            ),
            Notes([_apart(summary)]),
        ),
        is_reference=True,
    )


def _steps(summary: Summary) -> str:
    steps = summary.steps
    remarks = (
        (steps.num_warmup, "warm-up left out"),
        (steps.num_plain, "without detail left out"),
        (steps.num_unphased, f"without phases {'left out' if steps.has_phases else 'used'}"),
        (steps.num_seen - steps.num_common, "not on all ranks"),
        (steps.num_checkpoint, "with a checkpoint"),
        (steps.num_eval, "with an evaluation"),
        (steps.num_apart if steps.num_apart < steps.num_used else 0, "taken apart operation by operation"),
    )
    span = f"{steps.first} to {steps.last}" if steps.num_used > 1 else f"{steps.first}"
    kept = [f"only those from {steps.kept_from} on were kept"] if steps.kept_from else []
    counted = [f"{count} {what}" for count, what in remarks if count]
    return "; ".join([f"{steps.num_used} used ({span}) of {steps.num_seen}", *kept, *counted])


def _apart(summary: Summary) -> str:
    """Return what rests on steps that were taken apart, where these are some of the steps; empty otherwise."""
    steps = summary.steps
    if not 0 < steps.num_apart < steps.num_used:
        return ""
    return (
        f"jitter, gains, suspected ranks and transfer against skew come from {steps.num_apart} of the "
        f"{steps.num_used} steps ({percent(steps.num_apart / steps.num_used)}), in stretches spread over the run; "
        "their intervals are those of so many steps"
    )


def _excess(summary: Summary) -> str:
    if summary.unknown:
        return summary.unknown
    compared = [(row.rank, row.excess) for row in summary.ranks if row.excess is not None]
    if not compared:
        return "not compared: no two ranks are known to do the same work for enough steps"
    compared.sort(key=lambda pair: -pair[1].share)
    named = [pair for pair in compared if pair[1].is_marked]
    floor = summary.thresholds.get(ExcessThresholds.topic, {}).get("excess_floor", ExcessThresholds.excess_floor)
    found = named or [pair for pair in compared if pair[1].share > max(pair[1].noise, floor)]
    if not found:
        return "no rank has more own work than the others of its role beyond noise"
    words = [
        f"rank {rank} {100 * excess.share:+.1f} % own work against its role (noise {percent(excess.noise)})"
        for rank, excess in found
    ]
    no_culprit = "" if named else "; not named as late: in few steps only, or within what ranks differ by here"
    return "; ".join(first_few(words, _MAX_EXCESS)) + no_culprit


def changed_thresholds(summary: Summary) -> list[str]:
    """Return the thresholds of a summary that are not the defaults, with these: `straggler_share 0.1 (0.03)`."""
    usual = asdict(DiagnosisConfig())
    return [
        f"{name} {value:g} ({usual[name]:g})" for name, value in summary.settings.items() if value != usual.get(name)
    ]


def switches_line(switches: Switches) -> str:
    """Return which file the leaf switches of the hosts are from; empty where Slurm reported them, or nobody did."""
    if not switches.num_leaves or switches.source == SLURM_ADDRESS:
        return ""
    noun = "leaf switch" if switches.num_leaves == 1 else "leaf switches"
    return f"{switches.num_leaves} {noun}, by {switches.source}"


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
