"""How pacing policies change throughput and variation at each number of nodes, and the published table.

`python analysis/pacing_table.py RUN... [--out DIR]`, for runs of sbatch/pacing_trial.sh or any others;
`python analysis/pacing_table.py --simulate [--out DIR]` shows what the published table would require
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpace.core.config import NO_POLICY
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.rundir import open_run
from hpcpace.core.text import format_count, plural, printable
from hpcpace.metrics.resampling import Estimate
from hpcpace.plots import charts as plots
from hpcpace.plots import files
from hpcpace.report.terminal import note, table, title
from hpcpace.studies.paced_jobs import RANKS_PER_NODE, Target
from hpcpace.studies.pacing import (
    NEAR,
    PacingRow,
    Simulation,
    has_published_gains,
    is_as_calm,
    pacing_rows,
    read_paced_run,
    read_published_pacing,
    shown,
    simulations,
    strengths_needed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, MODEL = "pacing_table", "pacing_table_model"
PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published" / "pacing_table.csv"
COLUMNS = (
    *("nodes", "policy", "num_runs", "samples_per_s", "samples_per_s_low", "samples_per_s_high"),
    *("variation", "variation_low", "variation_high", "gain", "gain_low", "gain_high"),
    *("published_gain", "published_variation"),
)
MODEL_COLUMNS = (
    *("coupling", "strength", "cause", "policy", "nodes", "gain", "variation", "baseline_variation", "is_fit"),
    *("published_gain", "published_variation"),
)
REQUIRES = {
    "none": "nothing but waiting",
    "poll stealing": f"{RANKS_PER_NODE} ranks on each core that poll while they wait (weight of a polling rank)",
    "power share": f"{RANKS_PER_NODE} ranks a node that share a power budget (boost of one that computes alone)",
    "goodput collapse": "all messages of a step on one link that loses goodput beyond 16 at once (strength)",
}
MEANING = {
    "rotating": "rare events strike another rank each time",
    "lasting": "one rank of each node always has more work, and all vary together",
}


def values_of(row: PacingRow, published: Sequence[Target]) -> list[Any]:
    theirs = next((target for target in published if target.nodes == row.nodes), None)
    values: list[Any] = [row.nodes, row.policy, row.num_runs]
    for found in (row.samples_per_s, row.variation, row.gain):
        values += [None] * 3 if found is None else [finite(part) for part in (found.value, found.low, found.high)]
    if theirs is None:
        return [*values, None, None]
    is_baseline = row.policy == NO_POLICY
    variation = theirs.variation if is_baseline else theirs.paced_variation
    return [*values, None if is_baseline else theirs.gain, variation]


def finite(value: float) -> float | None:
    return value if isfinite(value) else None


def print_table(rows: Sequence[PacingRow], published: Sequence[Target]) -> None:
    console = files.console_for_tables()
    title(console, "Pacing", "means over repetitions, or over the steps of a single run, with 95 % intervals")
    head = ["policy", "runs", "samples/s\n(95 %)", "gain\n(95 %)", "published\ngain", "CV of the step\n(95 %)"]
    shown = files.rows_from_the_top(table("nodes", [*head, "published\nCV"]), left=(1,))
    for row in rows:
        of = dict(zip(COLUMNS, values_of(row, published), strict=True))
        shown.add_row(
            *(str(row.nodes), printable(row.policy), str(row.num_runs), spelled(row.samples_per_s, format_count)),
            spelled(row.gain, lambda value: f"{100 * value:+.1f} %"),
            "" if of["published_gain"] is None else f"{100 * of['published_gain']:+.1f} %",
            spelled(row.variation, lambda value: f"{value:.3f}"),
            "" if of["published_variation"] is None else f"{of['published_variation']:.2f}",
        )
    console.print(shown)
    for row in rows:
        for sentence in row.sentences:
            note(console, f"{plural(row.nodes, 'node')}, {row.policy}: {sentence}")
    note(console, "A lower CV alone is no gain. The published table has no intervals, no runs and no mechanism.")
    nodes = {row.nodes for row in rows}
    if not nodes & {target.nodes for target in published}:
        note(console, f"Nothing was published for {', '.join(map(str, sorted(nodes)))} nodes.")


def spelled(found: Estimate | None, of: Callable[[float], str]) -> str:
    if found is None:
        return ""
    return of(found.value) + (f"\n{of(found.low)} to {of(found.high)}" if isfinite(found.low) else "")


def draw(rows: Sequence[PacingRow], published: Sequence[Target]) -> Figure:
    import numpy as np

    figure = plots.new_figure(9.5, 4.2)
    gains, variations = figure.subplots(1, 2)
    for index, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        of_policy = [row for row in rows if row.policy == policy]
        label = plots.plot_label("baseline" if policy == NO_POLICY else policy)
        for axes, name, factor in ((gains, "gain", 100.0), (variations, "variation", 1.0)):
            known = [(row.nodes, getattr(row, name)) for row in of_policy if getattr(row, name) is not None]
            if known:
                x = np.array([nodes for nodes, _ in known])
                value, low, high = (
                    factor * np.array([getattr(found, end) for _, found in known]) for end in ("value", "low", "high")
                )
                ends = (low, high) if np.isfinite(low).all() else None
                plots.draw_curve(axes, x, value, ends, None, label, index)
    nodes = [target.nodes for target in published]
    dashed: dict[str, Any] = {"color": plots.GREY, "linestyle": "--"}
    gains.plot(nodes, [100 * target.gain for target in published], **dashed, label="published")
    variations.plot(nodes, [target.variation for target in published], **dashed, label="published, baseline")
    variations.plot(
        nodes,
        [target.paced_variation for target in published],
        color=plots.GREY,
        linestyle=":",
        label="published, paced",
    )
    gains.axhline(0, color=plots.BLACK, linewidth=0.8)
    for axes, label in ((gains, "gain of throughput, %"), (variations, "coefficient of variation of the step time")):
        ticks = sorted({*nodes, *(row.nodes for row in rows)})
        finish(axes, ticks, label)
    return figure


def finish(axes: Any, ticks: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("nodes", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.grid(alpha=0.25)
    plots.plain(axes)
    axes.legend(frameon=False, fontsize=8)


def model_rows(found: Sequence[Simulation], published: Sequence[Target]) -> list[list[Any]]:
    return [
        [
            *(one.scene.coupling, one.scene.strength, one.scene.cause, one.policy, outcome.nodes, outcome.gain),
            *(outcome.variation, outcome.baseline_variation, is_fit, target.gain, target.paced_variation),
        ]
        for one in found
        for outcome, is_fit, target in zip(one.outcomes, one.fits, published, strict=True)
    ]


def print_model(found: Sequence[Simulation], published: Sequence[Target]) -> None:
    console = files.console_for_tables()
    title(
        console,
        "What the published table would require",
        "simulated; nearest gains, and the calmest job",
    )
    head = ["strength", "cause", "policy", *(f"gain at\n{target.nodes}" for target in published)]
    last = published[-1]
    rows = files.rows_from_the_top(table("coupling", [*head, f"CV at {last.nodes}\nfrom  to"]), left=(2, 3))
    gains = [f"{100 * target.gain:+.1f}" for target in published]
    rows.add_row("published", "", "", "", *gains, f"{last.variation:.2f}  {last.paced_variation:.2f}")
    for one in shown(found, published):
        values = [
            f"{100 * outcome.gain:+.1f}" + "" if fits else "no fit"
            for outcome, fits in zip(one.outcomes, one.fits, strict=True)
        ]
        end = one.outcomes[-1]
        rows.add_row(
            *(one.scene.coupling, f"{one.scene.strength:g}", one.scene.cause, one.policy, *values),
            f"{end.baseline_variation:.2f}  {end.variation:.2f}",
        )
    console.print(rows)
    for line in conclusions(found, published):
        note(console, line)


def conclusions(found: Sequence[Simulation], published: Sequence[Target]) -> list[str]:
    """Return in plain words what the published table requires."""
    lines = [f"{name}: {text}" for name, text in (REQUIRES | MEANING).items() if name != "none"]
    without = max(outcome.gain for one in found if one.scene.coupling == "none" for outcome in one.outcomes)
    lines.append(f"Without a coupling the most that any policy gains is {100 * without:+.1f} %: waiting gives nothing.")
    last = published[-1]
    for one, strength in strengths_needed(found, last):
        lines.append(
            f"The published {100 * last.gain:+.1f} % at {last.nodes} nodes: {one.scene.coupling} of about "
            f"{strength:.2g} ({one.scene.cause}, {one.policy}); at {published[0].nodes} nodes "
            f"{100 * one.outcomes[0].gain:+.1f} % or more come with it, where "
            f"{100 * published[0].gain:+.1f} % were published."
        )
    gaining = [one for one in found if has_published_gains(one, published)]
    calmer = [one for one in found if is_as_calm(one, published)]
    both = [one for one in gaining if one in calmer]
    for what, ones in (
        (f"The published gains, within {100 * NEAR:.0f} points at every number of nodes", gaining),
        (f"At least half of the published fall of the CV at {last.nodes} nodes", calmer),
        ("Both at once", both),
    ):
        kinds = dict.fromkeys(f"{one.scene.coupling} ({one.scene.cause}, {one.policy})" for one in ones)
        lines.append(f"{what}: {'; '.join(kinds) or 'in none of the simulated jobs'}.")
    if calmer and not both:
        worst = min(calmer, key=lambda one: one.outcomes[-1].gain).outcomes[-1]
        lines.append(
            f"Where the CV falls so far, throughput falls as well, by up to {-100 * worst.gain:.0f} %: delays even out "
            "the steps by making the short ones long."
        )
    lines.append(
        "The baseline itself asks for much: its events, or the surplus of its slow ranks, have to grow with the "
        "number of nodes. The paper measured no mechanism, so that none of this says what its jobs did."
    )
    return lines


def draw_model(found: Sequence[Simulation], published: Sequence[Target]) -> Figure:
    import numpy as np

    figure = plots.new_figure(9.5, 5.6)
    gains, variations = figure.subplots(1, 2)
    nodes = np.array([target.nodes for target in published])
    for index, one in enumerate(shown(found, published)):
        gain = np.array([100 * outcome.gain for outcome in one.outcomes])
        share = np.array([outcome.variation / outcome.baseline_variation for outcome in one.outcomes])
        plots.draw_curve(gains, nodes, gain, None, None, one.label, index)
        plots.draw_curve(variations, nodes, share, None, None, one.label, index)
    dashed: dict[str, Any] = {"color": plots.BLACK, "linestyle": "--", "label": "published"}
    gains.plot(nodes, [100 * target.gain for target in published], **dashed)
    variations.plot(nodes, [target.paced_variation / target.variation for target in published], **dashed)
    finish(gains, nodes.tolist(), "gain of throughput, %")
    finish(variations, nodes.tolist(), "CV of the step time, paced over not paced")
    for axes in (gains, variations):
        axes.get_legend().remove()
    labels = gains.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Show what the published table would require: a minute, no RUN needed.")
@files.out_option
def command(runs: tuple[Path, ...], simulate: bool, out: Path) -> None:
    """Show throughput and variation of paced RUNs and the published table, or what that table would require."""
    published = read_published_pacing(PUBLISHED)
    if not runs and not simulate:
        raise UsageError("name runs, as sbatch/pacing_trial.sh makes them, or give --simulate")
    if runs:
        rows = pacing_rows([read_paced_run(run) for run in [open_run(path) for path in runs]])
        if all(row.samples_per_s is None for row in rows):
            raise CannotTell("no run has credited samples to its steps: throughput is unknown")
        figure = draw(rows, published)
        values = [values_of(row, published) for row in rows]
        written = files.write_files(out, NAME, columns=COLUMNS, rows=values, figure=figure)
        print_table(rows, published)
        print(written)
    if simulate:
        found = simulations(published)
        figure = draw_model(found, published)
        values = model_rows(found, published)
        written = files.write_files(out, MODEL, columns=MODEL_COLUMNS, rows=values, figure=figure)
        print_model(found, published)
        print(written)


if __name__ == "__main__":
    files.run_script(command)
