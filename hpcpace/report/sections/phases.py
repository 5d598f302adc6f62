"""Phases: where the step of each role and rank went, and whose own work exceeds that of its role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hpcpace.core.text import NS_PER_MS, milliseconds, percent
from hpcpace.diagnosis.summary import WAIT_OR_TRANSFER, Excess, Part, RankRow, RoleRow, Summary
from hpcpace.report.document import NONE, PAGE, TERMINAL, UNKNOWN, Block, Cell, Notes, Plot, Row, Section, Table
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
from hpcpace.report.sections.overview import UNKNOWN_WAITS

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
