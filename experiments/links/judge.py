"""Reports every run of the experiment with today's rules, and counts which links are named."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.links.cases import CASES, LAYOUTS, NOTHING, SIZES, LinkJob, jobs
from hpcpace.config import Config
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Selection
from hpcpace.trace.attempt_reader import read_attempt

_MOST_REPETITIONS = 40


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a report said of a job.

    Attributes:
        is_right: it names the right link, or a set with it, and no other; of a job without a fault it names none.
        is_alone: the right link alone.
        named: varieties and links that it names.
        headline: of its verdict.
    """

    job: LinkJob
    is_right: bool
    is_alone: bool
    named: tuple[str, ...]
    headline: str
    load: float


def judge_all(folder: Path, document: Path | None) -> None:
    """Judge all jobs that have run, print those that went wrong, and write the document."""
    judged = []
    for job in jobs(_MOST_REPETITIONS):
        truth = folder / job.name / "job.json"
        if truth.exists():
            facts = json.loads(truth.read_text())
            if any(facts["codes"]):
                print(f"left out: {job.name} ended with {facts['codes']}")
                continue
            found = judged_job(job, folder / job.name, float(facts["load"]))
            judged.append(found)
            if not found.is_right:
                print(f"wrong: {job.name} ({', '.join(job.links)}): {found.named} {found.headline}", flush=True)
    print(table(judged))
    if document is not None:
        document.write_text(text(judged))


def judged_job(job: LinkJob, folder: Path, load: float) -> Judged:
    """Report a run and judge it."""
    run = RunDirectory(folder / "run")
    try:
        attempt = run.last_attempt()
        traces = read_attempt(attempt, tables=TABLES_USED)
        verdict = analyze_traces(run, attempt, traces, Selection(), Config()).summary.verdict
    except HpcpaceError as error:
        return Judged(job=job, is_right=False, is_alone=False, named=(), headline=f"error: {error}", load=load)
    sets = [
        (finding.variety or finding.mode, [alias.removeprefix("link ") for alias in culprit.aliases])
        for finding in verdict.findings
        for culprit in finding.culprits
        if culprit.kind == "link"
    ]
    hits = [bool(set(ids) & set(job.links)) for _, ids in sets]
    is_right = (bool(sets) and all(hits)) if job.links else not sets
    return Judged(
        job=job,
        is_right=is_right,
        is_alone=is_right and all(len(ids) == 1 for _, ids in sets),
        named=tuple(f"{variety}: {', '.join(ids)}" for variety, ids in sets),
        headline=verdict.headline,
        load=load,
    )


def table(judged: list[Judged]) -> str:
    """Return how many jobs of each case were right, by layout, as a table in Markdown."""
    by_place: dict[tuple[str, str, int], list[Judged]] = defaultdict(list)
    for one in judged:
        by_place[one.job.case, one.job.layout, one.job.num_hosts].append(one)
    run = {(one.job.layout, one.job.num_hosts) for one in judged}
    columns = [(layout, size) for size, _ in SIZES for layout in LAYOUTS if (layout, size) in run]
    lines = ["| case | " + " | ".join(f"{layout}, {size} hosts" for layout, size in columns) + " | all | 95 % |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for case in CASES:
        cells = [by_place[case, layout, size] for layout, size in columns]
        every = [one for cell in cells for one in cell]
        right = sum(one.is_right for one in every)
        counts = [f"{sum(one.is_right for one in cell)} of {len(cell)}" if cell else "" for cell in cells]
        alone = "" if case in NOTHING else f" ({sum(one.is_alone for one in every)} alone)"
        low, high = wilson(right, len(every))
        total = f"{right} of {len(every)}{alone} | {low:.0%} to {high:.0%}" if every else "not run | "
        lines.append(f"| {case} | " + " | ".join(counts) + f" | {total} |")
    return "\n".join(lines)


def wilson(count: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    if not number:
        return 0.0, 1.0
    z, share = 1.96, count / number
    middle = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def text(judged: list[Judged]) -> str:
    """Return the document."""
    loads = sorted(one.load for one in judged) or [0.0]
    wrong = [
        f"- {one.job.name}: {'; '.join(one.named) or 'no link'}. {one.headline}" for one in judged if not one.is_right
    ]
    healthy = ", ".join(NOTHING)
    return f"""# Which links are named in the lab

Written by `python -m experiments.links judge --write` on {datetime.now(UTC):%Y-%m-%d}, from {len(judged)} jobs that
`python -m experiments.links run` had run in the lab: real training over real TCP, one rank a host, links and uplinks of
200 Mb/s, steps for 10 to 90 s. Ranks are forks of one process a host, because importing torch takes longer than a job.
Some jobs had the machine of two cores to themselves, next to others there were other labs and tests: its load was
{loads[0]:.0f} to {loads[-1]:.0f}, median {loads[len(loads) // 2]:.0f}. The rules were developed on such jobs, these
among them. Pipelines (pp) send messages of 1 MiB, which take 40 ms; with 16 and 256 KiB, slow links are not named.

A job counts as right if its report names the link of the fault, alone or in a set of links that it says it cannot tell
apart, and no other; of cases without a fault ({healthy}) if it names no link. In brackets: jobs where the link is
named alone. The interval is Wilson's.

| case | what is done |
|---|---|
| healthy | nothing |
| full | nothing; steps without computation, so that all links are at their rate |
| slow host | the link of a host has 60 Mb/s |
| slow uplink | the uplink of a leaf has 50 Mb/s, a quarter of its rate |
| traffic | 80 Mb/s from a host to one on the next leaf, by iperf3; all links on its way are right |
| loss | 1 % of the packets on the link of a host |
| flapping | the link of a host is down for 0.5 s of every 4 s |
| mtu | the link of a host has an MTU of 1,000 |

## Right names
{table(judged)}

## What went wrong
{chr(10).join(wrong) or "Nothing."}
"""
