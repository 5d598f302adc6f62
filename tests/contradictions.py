"""What a report says in one place and denies in another: the verdict held against the sections of the same report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from experiments.score.cells import CELLS, LOST_CELLS, Cell
from experiments.score.generator import write_run
from experiments.score.layout_cells import LAYOUT_CELLS, LayoutCell, LayoutScenario
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import Analysis, analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Finding, Mode, Summary
from hpcpace.report.document import Document, Row, Table
from hpcpace.report.run_report import run_document
from hpcpace.trace.attempt_reader import read_attempt

SCORED = (*CELLS, *LOST_CELLS, *LAYOUT_CELLS)
_TOLERANCE = 0.02  # of the step, by which two estimates of the same cost may differ
_OF_WAITS = (Mode.CONTENTION, Mode.COMMUNICATION, Mode.STRAGGLER, Mode.AMPLIFICATION)
# Who waits for data holds others up, too.
_PARTS_OF: dict[str, tuple[str, ...]] = {
    Mode.INPUT: ("data", "wait", "sync_wait"),
    Mode.HOST: ("host", "wait", "sync_wait"),
}
_NUMBER = re.compile(r"(-?[\d.]+) (ns|us|ms|s)\b")
_SCALE = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def contradictions(analysis: Analysis) -> list[str]:
    """Return what a report contradicts itself in, a sentence each."""
    summary = analysis.summary
    document = run_document(summary, summary.verdict, analysis.plots)
    return [
        *_of_health(summary),
        *_of_blame(summary),
        *_of_costs(summary),
        *_of_tables(document),
        *_of_links(summary, document),
    ]


def _of_health(summary: Summary) -> Iterator[str]:
    """Yield what a healthy verdict, or one that cannot tell, denies."""
    verdict, jitter, settings = summary.verdict, summary.jitter, summary.settings
    if verdict.mode == Mode.CANNOT_TELL and (verdict.findings or verdict.culprits):
        yield "it cannot tell, and has findings"
    if verdict.mode != Mode.HEALTHY:
        return
    if verdict.findings or verdict.culprits:
        yield "healthy, with findings"
    if jitter is not None and jitter.amplification > 1:
        passing = jitter.loss_share * (jitter.amplification - jitter.persistent) / (jitter.amplification - 1)
        if passing > settings["jitter_share"] + _TOLERANCE:
            yield f"no amplified jitter, which costs {passing:.1%} in the section on jitter"
    for gain in summary.causes.gains if summary.causes is not None else ():
        if gain.name.startswith(("work of rank", "work of node")) and gain.interval[0] > settings["straggler_share"]:
            yield f"no straggler, while {gain.name} as usual gains {gain.gain_share:.1%}"
    if summary.shares.transfer is not None and summary.shares.transfer > settings["communication_share"] + _TOLERANCE:
        yield f"healthy, with transfers of {summary.shares.transfer:.1%}"


def _of_blame(summary: Summary) -> Iterator[str]:
    """Yield who is blamed that the report clears or leaves out elsewhere."""
    suspected = summary.causes.suspected_ranks if summary.causes is not None else ()
    hosts = {row.rank: row.host for row in summary.ranks}
    clear = {str(rank) for rank in suspected}
    for finding in summary.verdict.findings:
        if finding.mode in (Mode.HANG, Mode.ENDED):
            continue
        for culprit in finding.culprits:
            who = f"{culprit.kind} {culprit.id}"
            if culprit.kind == "rank" and int(culprit.id) not in hosts:
                yield f"{who} is blamed, of which there is no row"
            if culprit.kind == "rank" and culprit.id in clear:
                yield f"{who} is blamed, whose clock is said to be wrong, so that it is blamed on nobody"
            if culprit.kind == "node" and culprit.id not in hosts.values():
                yield f"{who} is blamed, of which there is no rank"
            low, high = culprit.interval
            if not low <= culprit.effect <= high:
                yield f"the effect of {who} is not in its interval: {culprit.effect:.3f} in {low:.3f} to {high:.3f}"


def _of_costs(summary: Summary) -> Iterator[str]:
    """Yield costs that are above what they are a part of, or that differ from place to place."""
    verdict = summary.verdict
    if verdict.findings and verdict.loss_share != verdict.findings[0].loss_share:
        yield "the verdict costs something else than its first finding"
    gains = {one.name: one for one in summary.causes.gains} if summary.causes is not None else {}
    for finding in verdict.findings:
        most = _most_of(finding, summary)
        if most is not None and finding.loss_share > most + _TOLERANCE:
            yield f"{finding.mode} costs {finding.loss_share:.1%}, more than the {most:.1%} that it is a part of"
        gain = gains.get(f"work of {finding.culprits[0].kind} {finding.culprits[0].id}") if finding.culprits else None
        is_alone = finding.mode == Mode.STRAGGLER and len(finding.culprits) == 1
        if is_alone and gain is not None and finding.loss_share < gain.interval[0] - _TOLERANCE:
            yield f"{finding.mode} costs {finding.loss_share:.1%}, and {gain.name} gains {gain.gain_share:.1%}"
    for name, gain in gains.items():
        if not gain.interval[0] - 1e-9 <= gain.gain_share <= gain.interval[1] + 1e-9:
            yield f"the gain of {name} is not in its interval"
    whole = summary.shares.whole
    if whole is not None and abs(sum(share for _, share in whole) - 1) > 0.01:
        yield f"the shares add up to {sum(share for _, share in whole):.3f}"


def _most_of(finding: Finding, summary: Summary) -> float | None:
    """Return the share of the step that a finding is a part of, that of the rank with most; None where not known."""
    names = _PARTS_OF.get(finding.mode)
    if names is None and finding.mode in _OF_WAITS:
        names = ("wait", "sync_wait", "transfer", "sync_transfer")
    if names is None or summary.world.missing:
        return None
    known = [[row.shares.get(name) for name in names] for row in summary.ranks if row.shares is not None]
    if len(known) < len(summary.ranks) or any(value is None for values in known for value in values):
        return None
    return max(sum(value or 0.0 for value in values) for values in known)


def _of_tables(document: Document) -> Iterator[str]:
    """Yield readings that the interval beside them denies."""
    for section in document.sections:
        for block in section.content:
            for row in block.rows if isinstance(block, Table) else ():
                cells = [str(cell) for cell in (row.cells if isinstance(row, Row) else row)]
                if "no dependence seen" in cells:
                    low, high = (float(number) * _SCALE[unit] for number, unit in _NUMBER.findall(cells[-2]))
                    if low > 0 or high < 0:
                        yield f"no dependence seen, with an interval of {cells[-2]}"


def _of_links(summary: Summary, document: Document) -> Iterator[str]:
    """Yield links that are blamed where the plot of transfers between nodes shows no pair that differs."""
    slow = [
        f"{culprit.kind} {culprit.id}"
        for finding in summary.verdict.findings
        if finding.mode == Mode.CONTENTION and finding.variety == "slow link"
        for culprit in finding.culprits
    ]
    for plot in document.plots():
        if slow and plot.name == "matrix-node" and "No pair differs from it" in plot.caption:
            yield f"{slow[0]} is slow, while transfers between all nodes are alike"


def small_scenario(cell: Cell | LayoutCell) -> Scenario | LayoutScenario:
    """Return the smallest scenario of a cell among its first seeds to develop with."""
    drawn = [cell.scenario(seed) for seed in range(0, 60, 2)]
    return min(drawn, key=lambda one: one.num_ranks * one.num_steps)


def analysed(scenario: Scenario | LayoutScenario, folder: Path) -> Analysis:
    """Return the report on a scenario, whose run is written to a folder."""
    if isinstance(scenario, LayoutScenario):
        scenario.job.write(folder)
        run = RunDirectory(folder)
    else:
        run = write_run(scenario, folder)
    attempt = run.attempts()[-1]
    return analyze_traces(run, attempt, read_attempt(attempt), Selection())
