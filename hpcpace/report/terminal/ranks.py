"""The tables of a report: where each rank's step went, and its communication by kind and by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.core.text import format_duration, milliseconds, percent, printable, rank_list
from hpcpace.diagnosis.summary import Excess, Kind, Part, RankRow, RoleRow, Summary
from hpcpace.report.terminal import layout
from hpcpace.report.words.cores import CORE_HEAD, core_cells
from hpcpace.report.words.run import UNKNOWN_WAITS, message_size

UNKNOWN = "?"
_MOST_RANKS = 16
_MOST_HOSTS = 8
_EXTREME_RANKS = 8
_TOLD_APART = ("wait", "trans-\nfer")
_EITHER = "wait or\ntransfer"
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
    _EITHER: (Part.WAIT, Part.TRANSFER),
    "other": (Part.OTHER,),
}
_ALWAYS = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.WAIT, Part.TRANSFER, Part.OTHER)
_EXCESS_NOTE = (
    "excess: own work (without waits, transfers, checkpoints, evaluations) above what is usual for the other ranks of "
    "the same role, with its noise below; < marks the ranks that the verdict names as late"
)


def rows_shown(summary: Summary, ranks: Sequence[int] | None) -> list[RankRow]:
    """Return the rows of the ranks asked for; otherwise all, or of more than 16 those with the largest excess."""
    if ranks is not None:
        return [row for row in summary.ranks if row.rank in ranks]
    if len(summary.ranks) <= _MOST_RANKS:
        return list(summary.ranks)
    largest = sorted(summary.ranks, key=lambda row: -(row.excess.share if row.excess else row.busy_share or 0.0))
    return sorted(largest[:_EXTREME_RANKS], key=lambda row: row.rank)


def print_steps(console: Console, summary: Summary, shown: Sequence[RankRow]) -> None:
    """Print milliseconds and shares per phase of roles and ranks."""
    layout.title(console, "Where the step went", "ms per step, and below it the share of the step in percent")
    if all(row.parts_ns is None for row in summary.ranks):
        layout.note(console, summary.unknown)
        return
    are_waits_known = _are_waits_known(summary.ranks)
    names = [
        name
        for name, parts in _COLUMNS.items()
        if parts[0] in _ALWAYS
        or any(row.parts_ns[part.name.lower()] for row in summary.ranks if row.parts_ns for part in parts)
    ]
    if are_waits_known:
        names.remove(_EITHER)
    is_part = len(shown) < len(summary.ranks)
    table = layout.table("rank", ["step", *names, "excess"])
    for role in summary.roles:
        of_role = [row for row in shown if row.rank in role.ranks]
        if is_part or (len(summary.roles) > 1 and len(role.ranks) > 1):
            table.add_row()
            _add(table, (printable(role.role), f"{len(role.ranks)} ranks"), role, names, None)
        for row in of_role:
            _add(table, (str(row.rank), ""), row, names, row.excess)
    console.print(table)
    if is_part:
        layout.note(
            console,
            f"{len(shown)} of {len(summary.ranks)} ranks shown: those with the largest excess, or those asked for",
        )
    if any(row.parts_ns is None for row in shown):
        layout.note(console, f"{UNKNOWN}: {summary.unknown}")
    if not are_waits_known:
        layout.note(console, f"{UNKNOWN} in wait and transfer: {UNKNOWN_WAITS}")
    if "host" in names:
        layout.note(console, "host: the device waited for its host to issue work")
    if any(row.excess for row in shown):
        layout.note(console, _EXCESS_NOTE)
    if "grad\nsync" in names:
        layout.note(console, "grad sync includes its own wait and transfer; those two columns are of all other phases")


def print_devices(console: Console, summary: Summary) -> None:
    """Print what hosts and devices did in each phase; nothing without device times."""
    if not summary.devices:
        return
    layout.title(console, "Host and device", "per step; lead: how far the host is ahead where a phase begins")
    table = layout.table("phase", ["host", "device", "lead", "ran dry"])
    for row in summary.devices:
        times = (format_duration(time_ns) for time_ns in (row.host_ns, row.device_ns, row.lead_ns))
        table.add_row(row.phase, *times, percent(row.dry_share))
    console.print(table)
    layout.note(console, "ran dry: share of begins at which the device had no work left and waited for the host")


def print_cores(console: Console, summary: Summary) -> None:
    """Print the hosts on which ranks wait for cores; nothing without any."""
    if not summary.cores:
        return
    layout.title(console, "Cores", "of the hosts on which ranks wait for them")
    table = layout.table(CORE_HEAD[0], [name.replace(" ", "\n") for name in CORE_HEAD[1:]])
    for row in summary.cores[:_MOST_HOSTS]:
        table.add_row(*map(printable, core_cells(row)))
    console.print(table)
    if len(summary.cores) > _MOST_HOSTS:
        layout.note(console, f"{_MOST_HOSTS} of {len(summary.cores)} hosts, those of the longest waiting")
    layout.note(
        console, "waiting: share of the time for which a rank was ready to run and had no core, of the worst rank"
    )


def _add(
    table: Table, labels: tuple[str, str], row: RankRow | RoleRow, names: Sequence[str], excess: Excess | None
) -> None:
    def cells(values: Mapping[str, float | None] | None, show: Callable[[float], str]) -> list[str]:
        if values is None:
            return [UNKNOWN] * len(names)
        return [_cell(values, name, show) for name in names]

    is_marked = excess is not None and excess.is_marked
    share = f"{100 * excess.share:+.1f}%" + ("<" if is_marked else " ") if excess else ""
    noise = f"~{100 * excess.noise:.1f}% " if excess else ""
    last = Text(share, style="bold red" if is_marked else "")
    ms = milliseconds
    table.add_row(labels[0], ms(row.step_ns), *cells(row.parts_ns, ms), last, style="bold" if labels[1] else "")
    table.add_row(labels[1], "100", *cells(row.shares, lambda value: f"{100 * value:.1f}"), noise, style="dim")


def _cell(values: Mapping[str, float | None], name: str, show: Callable[[float], str]) -> str:
    """Return a cell; where waits are not known, only the sum of waits and transfers is."""
    if values["wait"] is None and name in _TOLD_APART:
        return UNKNOWN
    return show(sum(values[part.name.lower()] or 0.0 for part in _COLUMNS[name]))


def _are_waits_known(rows: Sequence[RankRow]) -> bool:
    return all(row.wait_ns is not None for row in rows)


def print_kinds(console: Console, summary: Summary) -> None:
    """Print the communication by kind of operation."""
    layout.title(console, "Communication by kind", "of all ranks together")
    num_steps = summary.steps.num_used
    names = [
        "group\nsize",
        "calls\nper step",
        "bytes\nper step",
        "\nmedian",
        "\np95",
        "mean\nwait",
        "mean\ntransfer",
        "\nunmatched",
    ]
    table = layout.table("\noperation", names)
    for kind in summary.kinds:
        table.add_row(
            kind.op,
            str(kind.group_size or "?"),
            f"{kind.num_rows / num_steps:.4g}",
            message_size(kind.size_bytes / num_steps, kind.op),
            format_duration(kind.median_ns),
            format_duration(kind.p95_ns),
            _duration(kind.mean_wait_ns),
            _duration(kind.mean_transfer_ns),
            str(kind.num_unmatched or "-"),
        )
    console.print(table)
    for kind in summary.kinds:
        if kind.num_unmatched:
            where = rank_list(kind.ranks_unmatched)
            layout.note(
                console,
                f"{kind.num_unmatched} {kind.op} of {where} have no comparable counterpart on every member (trace "
                "missing or cut off, or clock, group or peer unknown): their blocked time counts as transfer",
            )


def print_rank_communication(console: Console, shown: Sequence[RankRow], kinds: Sequence[Kind]) -> None:
    """Print the communication of each rank; `kinds` are those of all ranks together."""
    unsized = [kind.op for kind in kinds if not kind.size_bytes]
    layout.title(console, "Communication by rank", "per step; exposed is the part that blocked the rank")
    either = [] if _are_waits_known(shown) else ["exposed\neither"]
    table = layout.table("rank", ["calls", "bytes", "wait", "exposed\nwait", "transfer", "exposed\ntransfer", *either])
    for row in shown:
        table.add_row(
            str(row.rank),
            f"{row.num_operations:.4g}",
            message_size(row.size_bytes, *unsized),
            _duration(row.wait_ns),
            _duration(row.exposed_wait_ns),
            _duration(row.transfer_ns),
            _duration(row.exposed_transfer_ns),
            *([_duration(row.exposed_ns)] if either else []),
        )
    console.print(table)


def _duration(length_ns: float | None) -> str:
    return UNKNOWN if length_ns is None else format_duration(length_ns)
