"""The transfers of a run next to a probe of its hosts, on the terminal."""

from __future__ import annotations

from rich.console import Console

from hpcpace.core.text import printable
from hpcpace.diagnosis.summary import Summary
from hpcpace.report.terminal.layout import note, table, title
from hpcpace.report.words.probed import HEAD, probed_cells, probed_lead, probed_remarks

_MOST_ROWS = 8


def print_probed(console: Console, summary: Summary) -> None:
    """Print transfers next to the probe; nothing without one."""
    probed = summary.probe
    if probed is None:
        return
    title(console, "Next to the probe")
    note(console, probed_lead(probed))
    if probed.rows:
        rows = table(HEAD[0], HEAD[1:])
        for row in probed.rows[:_MOST_ROWS]:
            rows.add_row(*(printable(cell) for cell in probed_cells(row)))
        console.print(rows)
    for remark in probed_remarks(probed):
        note(console, remark)
