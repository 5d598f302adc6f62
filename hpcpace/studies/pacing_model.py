"""What the published pacing table would require: simulated jobs as a table, in words and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpace.plots import charts, files
from hpcpace.report.terminal import note, table, title
from hpcpace.studies.paced_jobs import RANKS_PER_NODE, Target
from hpcpace.studies.pacing import NEAR, Simulation, has_published_gains, is_as_calm, shown, strengths_needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def model_rows(found: Sequence[Simulation], published: Sequence[Target]) -> list[list[Any]]:
    """Return a row for each simulation and number of nodes, with the columns of `MODEL_COLUMNS`."""
    return [
        [
            *(one.scene.coupling, one.scene.strength, one.scene.cause, one.policy, outcome.nodes, outcome.gain),
            *(outcome.variation, outcome.baseline_variation, is_fit, target.gain, target.paced_variation),
        ]
        for one in found
        for outcome, is_fit, target in zip(one.outcomes, one.fits, published, strict=True)
    ]


def print_model(found: Sequence[Simulation], published: Sequence[Target]) -> None:
    """Print the simulations to show as a table, and what follows from all of them."""
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
    """Return a plot of the gains and variations of the simulations to show, beside the published ones."""
    figure = charts.new_figure(9.5, 5.6)
    gains, variations = figure.subplots(1, 2)
    nodes = [target.nodes for target in published]
    theirs = {
        gains: [100 * target.gain for target in published],
        variations: [target.paced_variation / target.variation for target in published],
    }
    for index, one in enumerate(shown(found, published)):
        gain = np.array([100 * outcome.gain for outcome in one.outcomes])
        share = np.array([outcome.variation / outcome.baseline_variation for outcome in one.outcomes])
        charts.draw_curve(gains, np.array(nodes), gain, None, None, one.label, index)
        charts.draw_curve(variations, np.array(nodes), share, None, None, one.label, index)
    for axes, values in theirs.items():
        axes.plot(nodes, values, color=charts.BLACK, linestyle="--", label="published")
    charts.label_curves(gains, "nodes", "gain of throughput, %", nodes)
    charts.label_curves(variations, "nodes", "CV of the step time, paced over not paced", nodes)
    for axes in (gains, variations):
        axes.get_legend().remove()
    figure.legend(*gains.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
