"""The report of a run: all of its sections in their order, on the terminal and as RUN/report.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpcpace import __version__
from hpcpace.core.files import write_file
from hpcpace.core.rundir import json_text
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import Summary, Verdict
from hpcpace.report.document import Document
from hpcpace.report.html import html_page
from hpcpace.report.sections.causes import causes_section, named_ranks_of
from hpcpace.report.sections.clocks import clocks_section
from hpcpace.report.sections.communication import communication_section
from hpcpace.report.sections.hosts import audit_section, cores_section, devices_section
from hpcpace.report.sections.jitter import jitter_section, pacing_section
from hpcpace.report.sections.left_out import left_out_section
from hpcpace.report.sections.network import network_section
from hpcpace.report.sections.overview import attempts_section, run_section, time_section
from hpcpace.report.sections.phases import phases_section, rows_shown
from hpcpace.report.sections.places import places_section
from hpcpace.report.sections.probed import probed_section
from hpcpace.report.sections.steps import own_delay_section, slowest_section, times_section
from hpcpace.report.sections.verdict import verdict_of, warnings_of
from hpcpace.report.terminal import print_document


def run_document(
    summary: Summary,
    verdict: Verdict,
    plots: PlotData,
    *,
    ranks: Sequence[int] | None = None,
    progress: str = "",
    timeline: str = "",
) -> Document:
    """Return all that there is to say of a run; the same arguments give the same document.

    Args:
        summary: figures of the run.
        verdict: what is said first.
        plots: what the plots show.
        ranks: the ranks that a terminal shows; with more than 16 of them, and none asked for, roles and extreme ranks.
        progress: how far a run is that still runs; empty of one that has ended.
        timeline: name of a file for Perfetto beside the page; empty without one.
    """
    named, shown = named_ranks_of(summary), rows_shown(summary, ranks)
    sections = [
        time_section(summary),
        run_section(summary, (*plots.versions, ("report by hpcpace", __version__)) if plots.versions else ()),
        attempts_section(summary),
        causes_section(summary),
        audit_section(summary),
        probed_section(summary),
        pacing_section(summary),
        times_section(summary, plots),
        slowest_section(plots, summary.run, timeline, named),
        own_delay_section(summary, plots, named),
        phases_section(summary, shown, named),
        devices_section(summary),
        cores_section(summary),
        communication_section(summary, plots, shown),
        network_section(summary, plots.network),
        jitter_section(summary, plots),
        places_section(summary, plots),
        clocks_section(summary, plots),
    ]
    which = f"attempt {summary.attempt}" + (f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else "")
    document = Document(
        heading="hpcpace report",
        subject=summary.run,
        remark=which,
        title=f"{verdict.mode}: {Path(summary.run).name}",
        verdict=verdict_of(summary, verdict),
        warnings=list(warnings_of(summary, progress)),
        sections=sections,
        data=json_text(summary.to_json()),
        has_choice=len(summary.ranks) > 1,
    )
    sections.append(left_out_section(summary, {plot.name for plot in document.plots()}, plots.reasons))
    return document


def print_report(
    console: Console,
    summary: Summary,
    *,
    ranks: Sequence[int] | None = None,
    progress: str = "",
    is_verbose: bool = False,
) -> None:
    """Print the report of a run; the arguments are those of `run_document` and `print_document`."""
    document = run_document(summary, summary.verdict, PlotData(), ranks=ranks, progress=progress)
    print_document(console, document, is_verbose=is_verbose)


def page(summary: Summary, verdict: Verdict, plots: PlotData, *, progress: str = "", timeline: str = "") -> str:
    """Return the report of a run as a page; the arguments are those of `run_document`."""
    return html_page(run_document(summary, verdict, plots, progress=progress, timeline=timeline))


def write_html(path: Path, summary: Summary, verdict: Verdict, plots: PlotData) -> None:
    """Write the page in one piece, so that a reader never sees half of it; see `hpcpace.core.files.Folder.write`.

    Raises:
        OSError: it cannot be written.
    """
    write_file(path, page(summary, verdict, plots))
