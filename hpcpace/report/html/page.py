"""RUN/report.html: one file that opens without a network, with the verdict first and then the plots that support it.

Nothing in it can load anything: a content security policy allows only the scripts written here, by their hashes. All
text that comes from files is escaped, so that the name of a host is never more than a name.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from hpcpace.core.files import write_file
from hpcpace.core.rundir import json_text
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.sentences import suspect_line
from hpcpace.diagnosis.summary import Summary, Verdict
from hpcpace.report.html import charts, maps, sections
from hpcpace.report.html.causes import cause_content, cause_plots
from hpcpace.report.html.figure import Plot
from hpcpace.report.html.frame import framed, tools
from hpcpace.report.html.jitter import jitter_notes, jitter_tiles, predictions_table
from hpcpace.report.html.lanes import slow_step, timeline_note
from hpcpace.report.html.network import network_content, network_drawn
from hpcpace.report.html.text import contents, escape, facts, figure, notes, section, side_by_side, warning
from hpcpace.report.html.verdict import hang_stacks, verdict_head
from hpcpace.report.words.audit import audit_subtitle
from hpcpace.report.words.causes import named_ranks_of
from hpcpace.report.words.pacing import pacing_lines
from hpcpace.report.words.run import MAY_CHANGE

_Section = tuple[str, str, tuple[str, ...]]  # title, lead, content

_TOOLS = tools("summary.json")
_CHOICE = (
    '<div class="tools choose" hidden role="search"><label for="choose">Only ranks or hosts</label>'
    '<input type="search" id="choose" placeholder="3, 8-15, n2" autocomplete="off" spellcheck="false">'
    '<span id="chosen" role="status"></span></div>'
)
_LEAST_POINTS = 3  # of a curve that begins at 1

_REASONS = {
    "step_ms": ("no plot of step times", "they are not known"),
    "own_delay_ms": ("no plot of own delay", "no two ranks do the same work, or their work is not known"),
    "phases": ("no plot of phases", "they are not known"),
    "communication_share": (
        "no plot of transfer over steps",
        "the share of transfer in each step is not known",
    ),
    "origins": (
        "no plot of where waiting began",
        "no rank waited, or the steps have too many operations to be rebuilt",
    ),
    "growth": ("no plot of growth with scale", "that needs three or more that wait for each other, in enough steps"),
    "hotspots": ("no places", "no place is slower than the others, or there are too few to compare"),
    "leaf_matrix": ("no matrix of switches", "Slurm reported no switches, or only one"),
    "node_matrix": ("no matrix of nodes", "no operation among some of the nodes was recorded"),
    "clocks": ("no plot of clock errors", "no synchronisation of clocks was recorded, as with a single host"),
}


def write_html(path: Path, summary: Summary, verdict: Verdict, plots: PlotData) -> None:
    """Write the page in one piece, so that a reader never sees half of it; see `hpcpace.core.files.Folder.write`.

    Args:
        path: where to, usually RUN/report.html.
        summary: figures of the run.
        verdict: what is said first.
        plots: what the plots show.

    Raises:
        OSError: it cannot be written.
    """
    write_file(path, page(summary, verdict, plots))


def page(summary: Summary, verdict: Verdict, plots: PlotData, *, progress: str = "", timeline: str = "") -> str:
    """Return the whole page; the same arguments give the same page.

    Args:
        summary, verdict, plots: as of `write_html`.
        progress: how far a run is that still runs; empty of one that has ended.
        timeline: name of a file for Perfetto beside the page; empty where there is none.
    """
    drawn = _drawn(summary, plots)
    return framed(
        f"{verdict.mode}: {Path(summary.run).name} · hpcpace",
        _body(summary, verdict, plots, drawn, progress, timeline),
        list(drawn.values()),
        json_text(summary.to_json()),
    )


def _drawn(summary: Summary, plots: PlotData) -> dict[str, Plot]:
    """Return the plots that have data, by name of the field that they show."""
    drawn: dict[str, Plot] = {}
    named = named_ranks_of(summary)
    if plots.step is not None and len(plots.step):
        step = plots.step
        if plots.step_ms is not None:
            drawn["step_ms"] = charts.step_times(step, plots.step_ms, summary.throughput)
            drawn["distribution"] = charts.step_distribution(plots.step_ms)
        if plots.own_delay_ms is not None and np.isfinite(plots.own_delay_ms).any():
            drawn["own_delay_ms"] = maps.own_delay(
                step, plots.own_delay_ms, plots.rank_labels, plots.delay_remark, _rows_of(named, summary)
            )
        if plots.communication_share is not None:
            drawn["communication_share"] = charts.regime(step, plots.communication_share)
    if plots.slow_step is not None:
        drawn["slow_step"] = slow_step(plots.slow_step, named)
    if any(row.parts_ns is not None for row in summary.ranks):
        drawn["phases"] = charts.phase_shares(summary, named)
    if any(kind.num_unmatched < kind.num_rows for kind in summary.kinds):
        drawn["kinds"] = charts.wait_and_transfer(summary.kinds)
    if plots.growth is not None and len(plots.growth.k) >= _LEAST_POINTS:
        drawn["growth"] = charts.growth(plots.growth)
    if plots.hotspots:
        drawn["hotspots"] = charts.hotspots(plots.hotspots)
    if plots.leaf_matrix is not None and np.isfinite(plots.leaf_matrix.ratio).any():
        drawn["leaf_matrix"] = maps.transfer_matrix(plots.leaf_matrix, "switch", "switches")
    if plots.node_matrix is not None and np.isfinite(plots.node_matrix.ratio).any():
        drawn["node_matrix"] = maps.transfer_matrix(plots.node_matrix, "node", "nodes")
    if plots.clocks and any(len(clock.time_s) for clock in plots.clocks):
        drawn["clocks"] = charts.clock_error(plots.clocks)
    return drawn | network_drawn(plots.network) | cause_plots(summary)


def _rows_of(named: Collection[int], summary: Summary) -> list[int]:
    return [row for row, of_rank in enumerate(summary.ranks) if of_rank.rank in named]


def _body(
    summary: Summary, verdict: Verdict, plots: PlotData, drawn: dict[str, Plot], progress: str, timeline: str
) -> str:
    reasons = [
        f"{what}: {plots.reasons.get(name, reason)}" for name, (what, reason) in _REASONS.items() if name not in drawn
    ]
    made = [
        (title, section(title, lead, *content))
        for title, lead, content in (
            *_overview(summary, drawn),
            *_details(summary, plots, drawn, timeline),
            ("What was left out", "", (sections.left_out(summary, reasons),)),
            ("This run", "", (sections.run_facts(summary, plots),)),
            ("Terms", "", (sections.terms(),)),
        )
    ]
    which = f"attempt {summary.attempt}" + (f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else "")
    head = f'<header class="run">hpcpace report of <b>{escape(summary.run)}</b>, {which}</header>'
    parts = (
        f'<div class="head">{head}{_TOOLS}</div>',
        warning(f"{progress}: {MAY_CHANGE}" if progress else "", "State"),
        verdict_head(verdict, [title for title, content in made if content]),
        hang_stacks(summary.hang),
        warning(suspect_line(summary.clocks)),
        *(warning(sentence) for sentence in summary.steps.warnings),
        *(warning(sentence) for sentence in summary.switches.problems),
        warning(summary.world.emulation, "Lab"),
        warning(summary.world.imported, "Imported"),
        contents([title for title, content in made if content]),
        _CHOICE if len(summary.ranks) > 1 else "",
        "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>",
        *(content for _, content in made),
    )
    return "\n".join(part for part in parts if part)


def _overview(summary: Summary, drawn: dict[str, Plot]) -> tuple[_Section, ...]:
    return (
        (
            "Where the time went",
            "Mean over ranks and used steps. Busy is forward, backward and optimizer.",
            (
                sections.shares_bar(summary.shares, has_missing=bool(summary.world.missing), unknown=summary.unknown),
                sections.speed_tiles(summary),
            ),
        ),
        (
            "Attempts",
            f"All other figures are of attempt {summary.attempt}.",
            (sections.attempts_table(summary),),
        ),
        (
            "Causes",
            "Whose delays the others waited for, what determines the step time, and what would shorten it.",
            cause_content(summary, drawn),
        ),
        (
            "Audit",
            audit_subtitle(summary.audit) if summary.audit is not None else "",
            (sections.audit_table(summary),),
        ),
        (
            "Next to the probe",
            "",
            (sections.probed_table(summary),),
        ),
        (
            "Pacing",
            "Whether holding early ranks back helped.",
            (facts(tuple(pacing_lines(summary.pacing))) if summary.pacing is not None else "",),
        ),
    )


def _details(summary: Summary, plots: PlotData, drawn: dict[str, Plot], timeline: str) -> tuple[_Section, ...]:
    def of(name: str, title: str = "") -> str:
        return figure(drawn[name], title) if name in drawn else ""

    slow = plots.slow_step
    closer = timeline_note(slow, summary.run, timeline) if slow is not None else ""

    return (
        ("Step times", "", (side_by_side(of("step_ms"), of("distribution")),)),
        ("Slowest step", "", (of("slow_step"), closer)),
        ("Own delay by rank and step", "", (of("own_delay_ms"),)),
        ("Phases by rank", "", (of("phases"), sections.devices_table(summary), sections.rank_table(summary))),
        (
            "Cores",
            "Hosts on which ranks were ready to run and had no core for a part of the time.",
            (sections.cores_table(summary),),
        ),
        (
            "Communication by kind",
            "",
            (
                of("kinds"),
                sections.kinds_table(summary),
                sections.sensitivity_table(summary),
                of("communication_share", "Transfer over steps"),
            ),
        ),
        (
            "Network",
            "What interfaces carried during the used steps, and what hosts sent to each other.",
            network_content(summary.network, drawn),
        ),
        (
            "Jitter and scale",
            "",
            (
                jitter_tiles(summary.jitter),
                notes([summary.unknown] if summary.unknown else []),
                of("growth", "Growth with scale"),
                jitter_notes(summary.jitter),
                predictions_table(summary.jitter),
            ),
        ),
        (
            "Places",
            "",
            (
                of("hotspots"),
                sections.hotspots_table(plots.hotspots or ()),
                side_by_side(of("leaf_matrix", "Switches"), of("node_matrix", "Nodes"), is_even=True),
            ),
        ),
        (
            "Clock error",
            "How well times of different hosts compare.",
            (of("clocks"), sections.clock_notes(summary)),
        ),
    )
