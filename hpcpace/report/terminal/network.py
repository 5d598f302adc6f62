"""The network on a terminal: the busiest interfaces, the rank pairs that are busy longest, and what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console

from hpcpace.core.text import NS_PER_S, format_bytes, format_duration, printable
from hpcpace.diagnosis.network_summary import InterfaceRow, NetworkFigures, PairRow
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.terminal import layout
from hpcpace.report.words.network import (
    end_name,
    foreign_cell,
    line_rate,
    network_notes,
    pair_cells,
    share,
    use_cells,
)

_MOST_INTERFACES, _MOST_PAIRS = 8, 6
_SHOWN_OF_MANY = 4
_NAME_WIDTH = 12
_PART_OF_MOST = 0.01  # of the bytes of the pair with most, for a pair to be shown


def print_network(console: Console, summary: Summary) -> None:
    """Print what interfaces and connections carried; nothing where none was recorded."""
    network = summary.network
    if network is None or not (network.interfaces or network.pairs):
        return
    span = format_duration(network.duration_s * NS_PER_S)
    layout.title(console, "Network", f"{span} of used steps; mean and {network.peak_s:g} s peak of the line rate")
    if network.interfaces:
        _print_interfaces(console, network)
    if network.pairs:
        _print_pairs(console, network)
    for sentence in network_notes(network):
        layout.note(console, sentence)


def _print_interfaces(console: Console, network: NetworkFigures) -> None:
    rows = network.interfaces
    shown = rows if len(rows) <= _MOST_INTERFACES else rows[:_SHOWN_OF_MANY]
    heads = ["line\nrate", "sent\na step", "\nmean", "\npeak", "received\na step", "\nmean", "\npeak"]
    table = layout.table("\ninterface", [*heads, "foreign\nsent", "\nreceived"])
    for row in shown:
        table.add_row(*_cells(row))
    if len(shown) < len(rows):
        table.add_row(f"median of {len(rows)}", *_medians(rows), style="dim")
    console.print(table)
    if len(shown) < len(rows):
        layout.note(console, f"the {len(shown)} busiest of {len(rows)} interfaces; all are in summary.json")


def _cells(row: InterfaceRow) -> tuple[str, ...]:
    name = "\n".join(_cut(part) for part in (row.host, row.interface))
    name = name if len(name) > _NAME_WIDTH else name.replace("\n", " ")
    sent, received = (
        (format_bytes(use.bytes_per_step), *map(_narrow, use_cells(use))) for use in (row.sent, row.received)
    )
    return (name, line_rate(row), *sent, *received, *(_narrow(foreign_cell(use)) for use in (row.sent, row.received)))


def _narrow(cell: str) -> str:
    """Return `38%` of `38 %`, and `251M` of `251 Mb/s`."""
    return cell.replace(" ", "").removesuffix("b/s")


def _cut(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _NAME_WIDTH else f"{shown[: _NAME_WIDTH - 3]}..."


def _medians(rows: Sequence[InterfaceRow]) -> list[str]:
    cells = [""]
    for uses in ([row.sent for row in rows], [row.received for row in rows]):
        known = [(use.utilisation, use.peak_utilisation) for use in uses]
        columns = ([one for one in column if one is not None] for column in zip(*known, strict=True))
        cells.append(format_bytes(median(use.bytes_per_step for use in uses)))
        cells += [_narrow(share(median(column) if column else None)) for column in columns]
    return cells


def _print_pairs(console: Console, network: NetworkFigures) -> None:
    most = max(row.bytes_per_step for row in network.pairs)
    rows = [row for row in network.pairs if row.bytes_per_step >= _PART_OF_MOST * most]
    shown = rows if len(rows) <= _MOST_PAIRS else rows[:_SHOWN_OF_MANY]
    console.print()
    table = layout.table("from rank", ["to rank", "payload\na step", "achieved\nrate", "\nsending", "sent\nagain"])
    for row in shown:
        table.add_row(*_ends(row), *pair_cells(row))
    console.print(table)
    if len(shown) < network.num_pairs:
        which = f"the {len(shown)} of {network.num_pairs} pairs of ranks that send longest"
        layout.note(console, which if len(shown) < len(rows) else f"{which}; the others carry little")


def _ends(row: PairRow) -> tuple[str, str]:
    source = end_name(row.source, row.source_host)
    return printable(source), printable(end_name(row.destination, row.destination_host))
