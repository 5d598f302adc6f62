"""How much waiting for the slowest rank costs each run, against what independent ranks would cost, and how it grows.

`python analysis/jitter_amplification.py RUN... [--out DIR]`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace import plots
from hpcpace.core.errors import CannotTell
from hpcpace.core.text import percent, printable
from hpcpace.diagnosis.figures.causes import jitter_figures
from hpcpace.diagnosis.summary import Jitter
from hpcpace.report.terminal import console_for_tables, note, table, title
from library import drawing, files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "jitter_amplification"
COLUMNS = (
    *("run", "num_ranks", "num_steps", "num_segments", "amplification", "amplification_low", "amplification_high"),
    *("persistent", "persistent_null", "transient", "loss_share", "null", "null_low", "null_high", "comparison"),
    *("unit", "exponent", "exponent_low", "exponent_high"),
)
NOTES = (
    "A = A_p A_t: slow ranks, and jitter proper. A_p in brackets is what noise alone would give.",
    "A above the null: events avoid each other (they rotate); below: ranks share their cause.",
    "exponent of A(k) - 1 over k, lasting differences out: 0 bounded noise, 1 / index heavy tails, 1 rare events.",
)


Found = tuple[str, Jitter | None]
"""A run, and what it loses to waiting; None where no two ranks wait for each other."""


def row_of(run: str, jitter: Jitter | None) -> dict[str, Any]:
    if jitter is None:
        return dict.fromkeys(COLUMNS) | {"run": run}
    nothing = (None, None)
    growth = (jitter.growth.exponent, *(jitter.growth.exponent_interval or nothing)) if jitter.growth else (None,) * 3
    values = (
        *(run, len(jitter.ranks), jitter.num_steps, jitter.num_segments),
        *(jitter.amplification, *(jitter.interval or nothing)),
        *(jitter.persistent, jitter.persistent_null, jitter.transient, jitter.loss_share),
        *(jitter.null, *(jitter.null_interval or nothing), jitter.comparison),
        *("node" if jitter.is_node_unit else "rank", *growth),
    )
    return dict(zip(COLUMNS, values, strict=True))


def print_table(results: Sequence[Found], remarks: Sequence[str]) -> None:
    console = console_for_tables()
    title(console, "Jitter amplification", "slowest rank over mean rank, per stretch between synchronisations")
    head = ["ranks", "steps", "A\n(95 %)", "A_p\n(noise)", "A_t", "loss of\nthe step", "null\n(95 %)", "A vs\nnull"]
    shown = files.rows_from_the_top(table("run", [*head, "exponent\n(95 %)"]))
    for run, jitter in results:
        if jitter is None:
            remarks = [*remarks, f"{run}: no two of its ranks are seen waiting for each other, or too few steps"]
            continue
        of = row_of(run, jitter)
        noise = "" if of["persistent_null"] is None else f"\n({of['persistent_null']:.3f})"
        shown.add_row(
            *(printable(run), str(of["num_ranks"]), str(of["num_steps"]), with_interval(of, "amplification", 3)),
            *(f"{of['persistent']:.3f}{noise}", f"{of['transient']:.3f}", percent(of["loss_share"])),
            *(with_interval(of, "null", 3), of["comparison"], with_interval(of, "exponent", 2)),
        )
    console.print(shown)
    for remark in (*remarks, *NOTES):
        note(console, remark)


def with_interval(of: Mapping[str, Any], name: str, digits: int) -> str:
    value, low, high = (of[key] for key in (name, f"{name}_low", f"{name}_high"))
    between = "" if low is None else f"\n{low:.{digits}f}-{high:.{digits}f}"
    return "" if value is None else f"{value:.{digits}f}{between}"


def draw(results: Sequence[Found]) -> Figure:
    figure, ticks = plots.new_figure(7.4, 4.6), [1]
    axes = figure.add_subplot()
    for index, (run, jitter) in enumerate(results):
        if jitter is None or (curve := jitter.growth) is None:
            continue
        label = f"{plots.plot_label(run)} ({'nodes' if jitter.is_node_unit else 'ranks'})"
        k, values, low, high, null = map(np.array, (curve.k, curve.amplification, curve.low, curve.high, curve.null))
        drawing.draw_curve(
            axes, k, values, (low, high) if len(low) else None, null if len(null) else None, label, index
        )
        while ticks[-1] < curve.k[-1]:
            ticks.append(2 * ticks[-1])
    drawing.explain_curves(axes, "the same, if units were independent")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("k: how many of the measured units wait for each other")
    axes.set_ylabel("A(k): slowest of k over mean work")
    axes.set_title("What waiting costs as more units wait for each other", loc="left", fontsize=11)
    return figure


@files.figure_command
def command(runs: tuple[Path, ...], out: Path) -> None:
    """Measure how jitter is amplified by synchronisation in each RUN: a table, and the growth curve A(k)."""
    results, remarks = list[Found](), list[str]()
    for run in files.examined(runs):
        results.append((run.name, jitter_figures(run.measured, run.panels)))
        remarks += [f"{run.name}: {remark}" for remark in run.remarks]
    if all(jitter is None for _, jitter in results):
        raise CannotTell("in no run are two ranks seen waiting for each other over 2 steps or more")
    rows = [tuple(row_of(*found).values()) for found in results]
    written = files.write_files(out, NAME, columns=COLUMNS, rows=rows, figure=draw(results), read=runs)
    print_table(results, remarks)
    print(written)


if __name__ == "__main__":
    files.run_script(command)
