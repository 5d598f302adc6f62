"""The run at a glance, its attempts and what ran, and phases: where the step of each role and rank went."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from hpcpace.core.text import (
    NS_PER_MS,
    few,
    first_few,
    format_bytes,
    format_count,
    format_duration,
    listed,
    milliseconds,
    percent,
    plural,
    printable,
)
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import (
    SLURM_ADDRESS,
    WAIT_OR_TRANSFER,
    AttemptRow,
    Excess,
    ExcessThresholds,
    Part,
    RankRow,
    RoleRow,
    Summary,
    Switches,
)
from hpcpace.report import document
from hpcpace.report.document import (
    NONE,
    PAGE,
    TERMINAL,
    UNKNOWN,
    Bar,
    Block,
    Cell,
    Facts,
    Notes,
    Plot,
    Row,
    Section,
    Table,
)
from hpcpace.report.drawing import (
    LABEL_WIDTH,
    NAMED,
    axis,
    bars,
    marked,
    marker,
    names_axis,
    plot_text,
    rounded,
    unique,
)
from hpcpace.report.sections.communication import duration

MAX_BARS = 64
_MAX_RANKS, _MAX_EXTREME = 16, 8
"""The ranks that a terminal shows: all, or of more than 16 the 8 with the largest excess."""
_MAX_ON_PAGE = 1024
_EXTREMES = 12
_TOLD_APART = ("wait", "trans-\nfer")
_EITHER_COLUMN = "wait or\ntransfer"
_COLUMNS = {
    "data": (Part.DATA,),
    "for-\nward": (Part.FORWARD,),
    "back-\nward": (Part.BACKWARD,),
    "opti-\nmizer": (Part.OPTIMIZER,),
    "host": (Part.HOST,),
    "gc": (Part.GC,),
    "pace": (Part.PACE,),
    "ckpt\neval": (Part.CHECKPOINT, Part.EVAL),
    "grad\nsync": (Part.SYNC_WAIT, Part.SYNC_TRANSFER),
    "wait": (Part.WAIT,),
    "trans-\nfer": (Part.TRANSFER,),
    _EITHER_COLUMN: (Part.WAIT, Part.TRANSFER),
    "other": (Part.OTHER,),
}
BROKEN = {name.replace("-\n", ""): name for name in _COLUMNS}
"""Names of phases as heads of narrow columns have them, with a line break; of short ones without."""
_ALWAYS = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.WAIT, Part.TRANSFER, Part.OTHER)
_EXCESS_NOTE = (
    "excess: own work (without waits, transfers, checkpoints, evaluations) above what is usual for the other ranks of "
    "the same role, with its noise below; < marks the ranks that the verdict names as late"
)

# (name, parts, colour, pattern): busy is blue, wait vermilion, transfer yellow; patterns tell equal hues apart.
PARTS = (
    ("data", ("data",), "@data", ""),
    ("forward", ("forward",), "@busy-1", ""),
    ("backward", ("backward",), "@busy-2", ""),
    ("optimizer", ("optimizer",), "@busy-3", ""),
    ("waiting for the host", ("host",), "@other", "/"),
    ("garbage collection", ("gc",), "@gc", ""),
    ("pacing", ("pace",), "@pace", ""),
    ("checkpoint, evaluation", ("checkpoint", "eval"), "@checkpoint", ""),
    ("gradient sync: wait", ("sync_wait",), "@wait", "/"),
    ("wait", ("wait",), "@wait", ""),
    ("gradient sync: transfer", ("sync_transfer",), "@transfer", "/"),
    ("transfer", ("transfer",), "@transfer", ""),
    ("gradient sync: wait or transfer", ("sync_either",), "@transfer", "/"),
    (WAIT_OR_TRANSFER, ("either",), "@transfer", ""),
    ("other", ("other",), "@other", ""),
)


Time = TypeVar("Time")
_EITHER = {"transfer": "either", "sync_transfer": "sync_either"}


def drawn_parts(values: Mapping[str, Time | None]) -> dict[str, Time]:
    """Return the parts of a step as they are drawn: those without waits that are known have `either`."""
    names = {} if values["wait"] is not None else _EITHER
    return {names.get(name, name): value for name, value in values.items() if value is not None}


def drawn_names(parts: Sequence[str], *, are_waits_known: bool) -> tuple[str, ...]:
    """Return what parts of a lane are drawn as, as `drawn_parts` names them."""
    if are_waits_known:
        return tuple(parts)
    return tuple(_EITHER.get(name.replace("wait", "transfer"), name) for name in parts)


def rows_shown(summary: Summary, ranks: Sequence[int] | None) -> list[RankRow]:
    """Return the rows of the ranks asked for; otherwise all, or of more than 16 those with the largest excess."""
    if ranks is not None:
        return [row for row in summary.ranks if row.rank in ranks]
    if len(summary.ranks) <= _MAX_RANKS:
        return list(summary.ranks)
    largest = sorted(summary.ranks, key=_excess_of, reverse=True)
    return sorted(largest[:_MAX_EXTREME], key=lambda row: row.rank)


def _excess_of(row: RankRow) -> float:
    return row.excess.share if row.excess else row.busy_share or 0.0


def phases_section(summary: Summary, shown: Sequence[RankRow], named: Collection[int]) -> Section:
    """Return where the step of ranks went.

    Args:
        summary: the figures.
        shown: the ranks that a terminal shows.
        named: the ranks that the verdict names, which are marked.
    """
    if all(row.parts_ns is None for row in summary.ranks):
        content: list[Block | None] = [Notes([summary.unknown], on=TERMINAL)]
    else:
        content = [phase_shares(summary, named), *_phase_table(summary, shown)]
    return Section(
        "Phases by rank",
        [*content, _rank_table(summary)],
        lead="means per step",
    )


def _phase_table(summary: Summary, shown: Sequence[RankRow]) -> list[Block | None]:
    are_waits_known = all(row.wait_ns is not None for row in summary.ranks)
    names = [
        name
        for name, parts in _COLUMNS.items()
        if parts[0] in _ALWAYS
        or any(row.parts_ns[part.name.lower()] for row in summary.ranks if row.parts_ns for part in parts)
    ]
    if are_waits_known:
        names.remove(_EITHER_COLUMN)
    is_part = len(shown) < len(summary.ranks)
    rows: list[Row] = []
    for role in summary.roles:
        if is_part or (len(summary.roles) > 1 and len(role.ranks) > 1):
            rows += [Row([""] * (len(names) + 3)), _phase_row(role.role, f"{len(role.ranks)} ranks", role, names, None)]
        rows += [_phase_row(str(row.rank), "", row, names, row.excess) for row in shown if row.rank in role.ranks]
    some = f"{len(shown)} of {len(summary.ranks)} ranks shown: those with the largest excess, or those asked for"
    sync = "grad sync includes its own wait and transfer; those two columns are of all other phases"
    remarks = (
        (is_part, some),
        (any(row.parts_ns is None for row in shown), f"{UNKNOWN}: {summary.unknown}"),
        (not are_waits_known, f"{UNKNOWN} in wait and transfer: {UNKNOWN_WAITS}"),
        ("host" in names, "host: the device waited for its host to issue work"),
        (any(row.excess for row in shown), _EXCESS_NOTE),
        ("grad\nsync" in names, sync),
    )
    return [
        Table(
            ["rank", "step", *names, "excess"], rows, "ms, and below them the share of the step in percent", on=TERMINAL
        ),
        Notes([words for is_said, words in remarks if is_said], on=TERMINAL),
    ]


def _phase_row(label: str, below: str, row: RankRow | RoleRow, names: Sequence[str], excess: Excess | None) -> Row:
    """Return milliseconds, and below them the shares."""

    def cells(values: Mapping[str, float | None] | None, show: Callable[[float], str]) -> list[str]:
        if values is None:
            return [UNKNOWN] * len(names)
        # Where waits are not known, only the sum of waits and transfers is.
        return [
            UNKNOWN
            if values["wait"] is None and name in _TOLD_APART
            else show(sum(values[part.name.lower()] or 0.0 for part in _COLUMNS[name]))
            for name in names
        ]

    is_marked = excess is not None and excess.is_marked
    share = f"{100 * excess.share:+.1f}%" + ("<" if is_marked else " ") if excess else ""
    noise = f"~{100 * excess.noise:.1f}% " if excess else ""
    upper = [milliseconds(row.step_ns), *cells(row.parts_ns, milliseconds)]
    lower = ["100", *cells(row.shares, lambda value: f"{100 * value:.1f}")]
    return Row(
        [
            Cell(label, below=below),
            *(Cell(ms, below=of_step) for ms, of_step in zip(upper, lower, strict=True)),
            Cell(share, below=noise, style="bad" if is_marked else ""),
        ],
        style="strong" if below else "",
    )


def _rank_table(summary: Summary) -> Table:
    """Return the figures of each rank, so that no number is in a plot alone."""
    are_waits_known = all(row.wait_ns is not None for row in summary.ranks)
    rows = [
        Row(
            (
                str(row.rank),
                row.host,
                row.role,
                f"{milliseconds(row.step_ns)} ms",
                NONE if row.busy_share is None else percent(row.busy_share),
                f"{100 * row.excess.share:+.1f} %" if row.excess else NONE,
                f"±{100 * row.excess.noise:.1f} %" if row.excess else NONE,
                duration(row.exposed_wait_ns),
                duration(row.exposed_transfer_ns),
                *([] if are_waits_known else [duration(row.exposed_ns)]),
            ),
            ranks=str(row.rank),
            hosts=row.host,
        )
        for row in summary.ranks
    ]
    head = ["rank", "host", "role", "step", "busy", "excess over role", "noise", "exposed wait", "exposed transfer"]
    return Table(
        [*head, *([] if are_waits_known else ["exposed wait or transfer"])],
        rows,
        "Means per step",
        text=(1, 2),
        limits=(0, _MAX_ON_PAGE),
        details=f"{'All ' * (len(rows) <= _MAX_ON_PAGE)}{len(rows)} ranks in figures",
        on=PAGE,
    )


def phase_shares(summary: Summary, named: Collection[int] = ()) -> Plot:
    """Return the stacked shares of the step: of ranks up to MAX_BARS, beyond that of roles and of extreme ranks.

    Args:
        summary: the figures.
        named: the ranks that the verdict names, which are marked.
    """
    is_few = len(summary.ranks) <= MAX_BARS
    ranks = [row for row in summary.ranks if row.parts_ns is not None]
    if not is_few:
        ordered = sorted(ranks, key=_excess_of)
        ranks = [*reversed(ordered[-_EXTREMES:]), *reversed(ordered[:_EXTREMES])]
    roles = [role for role in summary.roles if role.parts_ns is not None][: MAX_BARS - len(ranks)] if not is_few else []
    rows: list[RankRow | RoleRow] = [*roles, *ranks]
    names = [f"{plot_text(role.role, LABEL_WIDTH)} ({len(role.ranks)} ranks)" for role in roles]
    names += [marked(plot_text(f"{row.rank} {row.host}", LABEL_WIDTH), row.rank in named) for row in ranks]
    names = unique(names)
    about = [("", "") for _ in roles] + [(str(row.rank), row.host) for row in ranks]
    parts_ns = [drawn_parts(row.parts_ns) for row in rows if row.parts_ns is not None]
    shares = [drawn_parts(row.shares) for row in rows if row.shares is not None]
    shown = [bar for bar in PARTS if any(of.get(part) for of in parts_ns for part in bar[1])]
    dropped = len(summary.roles) - len(roles)
    some = f" Roles first, then the {len(ranks)} of {len(summary.ranks)} ranks with the largest and smallest excess"
    some += f"; {dropped} roles are not shown." if dropped else "."

    def sums(values: Sequence[Mapping[str, float]], parts: Sequence[str]) -> list[float]:
        return [sum(of.get(part, 0.0) for part in parts) for of in values]

    return Plot(
        name="phase-shares",
        label="Shares of the step by phase",
        caption="Means over the used steps; hover for milliseconds." + ("" if is_few else some) + NAMED * bool(named),
        height_px=70 + max(min(34, 760 // max(len(rows), 1)), 15) * len(rows),
        traces=[
            {
                **bars(
                    names,
                    100 * np.array(sums(shares, parts)),
                    marker(color, pattern),
                    f"%{{y}}: {name} %{{x:.1f}} %, %{{customdata:.4~g}} ms",
                    data=rounded(np.array(sums(parts_ns, parts)) / NS_PER_MS),
                ),
                "name": name,
            }
            for name, parts, color, pattern in shown
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.2,
            "xaxis": axis("% of the step", range=[0, 100]),
            "yaxis": names_axis(len(rows)),
        },
        legend=[(name, color, pattern) for name, _, color, pattern in shown],
        rows=[(name, *of) for name, of in zip(names, about, strict=True)],
    )


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
    parts = [document.Part(name, share, _COLORS[name]) for name, share in shares.whole or ()]
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
