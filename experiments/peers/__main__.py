"""Runs hpcpace and its closest peer, TraceML, on the same cases: `python -m experiments.peers --write`.

Needs root, Slurm's lab, and PyPI, from where the newest TraceML comes into --site unless it is there. Tools take turns
within each case. What has run stays in --folder, and the page is written from all of it; a call adds repetitions.

    flock /tmp/lab.lock python -m experiments.peers --only gradients link
    python -m experiments.peers --only healthy --repeats 5 --write

Options:
  --folder PATH   for runs and results [/var/tmp/hpcpace-peers]
  --only CASE...  run only these cases
  --repeats N     how often to run each; 0 to write alone [1]
  --write         write docs/results/peers.md from all results
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import distributions
from statistics import median
from typing import Any

from experiments.jobs import Rows, commit, teller
from experiments.options import command_line
from experiments.pages import ROOT, counted, table, write_page
from experiments.peers.runs import CASES, OURS, PEER, PLAIN, TOOLS, Case, Verdict, is_right, run
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

_PACKAGES = ("traceml-ai", "nvidia-ml-py")  # the second is what TraceML needs and hpcpace's environment lacks
_LINK = "1gbit"
_KIB = 1024
Row = dict[str, Any]


def main() -> None:
    args = command_line(__doc__, only=[case.name for case in CASES])
    site, rows, tell = args.folder / "site", Rows(args.folder / "rows.jsonl"), teller()
    if not site.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "-t", site, *_PACKAGES], check=True)
    of_peer = next(found.version for found in distributions(path=[str(site)]) if found.name == _PACKAGES[0])
    chosen = [case for case in CASES if args.only is None or case.name in args.only]
    with ExitStack() as stack:
        lab = None
        if args.repeats and any(case.in_lab for case in chosen):
            config = LabConfig(name="peers", hosts=2, leaves=1, link=_LINK, uplink=_LINK, share=(str(args.folder),))
            lab = stack.enter_context(Lab.up(config))
        for turn in range(args.repeats):
            for case in chosen:
                for tool in (*TOOLS[turn % 3 :], *TOOLS[: turn % 3]):
                    verdict, took = run(
                        case, tool, args.folder / f"{case.name}-{tool}", site, lab if case.in_lab else None
                    )
                    row = {"case": case.name, "tool": tool, "verdict": verdict and asdict(verdict), **asdict(took)}
                    rows.add({**row, "load": os.getloadavg()[0], "commit": commit(ROOT), "peer": of_peer})
                    said = (
                        ""
                        if verdict is None
                        else f"{'right' if is_right(case, verdict) else 'WRONG'}: {verdict.headline}"
                    )
                    tell(f"{case.name}, {tool}: {took.step_ms:.2f} ms of processor time a step. {said}")
    if args.write:
        _write(rows.read())


def _write(rows: Sequence[Row]) -> None:
    of_case = {case: [row for row in rows if row["case"] == case.name] for case in CASES}
    verdicts = {tool: [_judged(case, found, tool) for case, found in of_case.items()] for tool in (OURS, PEER)}
    write_page(
        "peers",
        verdicts=table(
            ("case", OURS, "right", PEER, "right"),
            ((case.title, *verdicts[OURS][number], *verdicts[PEER][number]) for number, case in enumerate(CASES)),
        ),
        scores={tool: counted(_is_all(cells[1]) for cells in found) for tool, found in verdicts.items()},
        costs=table(
            (
                "case",
                "runs",
                "steps/s: plain, hpcpace, TraceML",
                "ratio to plain",
                "processor time per step, ms",
                "ratio to plain",
            ),
            (_costs(case, found) for case, found in of_case.items() if case.name != "hang"),
        ),
        apart=table(("healthy", *TOOLS), _apart(of_case[CASES[0]])),
        versions=f"TraceML {', '.join(sorted({row['peer'] for row in rows}))}",
        commits=", ".join(sorted({row["commit"] for row in rows})),
        load=f"{min(row['load'] for row in rows):.0f} to {max(row['load'] for row in rows):.0f}",
    )


def _is_all(cell: str) -> bool:
    num_right, _, num_runs = cell.partition(" of ")
    return num_right == num_runs != "0"


def _judged(case: Case, rows: Sequence[Row], tool: str) -> tuple[str, str]:
    """Return what a tool said in its last run of a case, and in how many of all runs it was right."""
    found = [row["verdict"] and Verdict(**row["verdict"]) for row in rows if row["tool"] == tool]
    last = next((verdict.headline for verdict in reversed(found) if verdict), "says nothing")
    return last, counted(verdict and is_right(case, verdict) for verdict in found)


def _values(rows: Sequence[Row], tool: str, field: str) -> list[float]:
    return [row[field] for row in rows if row["tool"] == tool]


def _costs(case: Case, rows: Sequence[Row]) -> Iterator[str]:
    yield case.title
    yield str(min(len(_values(rows, tool, "step_ms")) for tool in TOOLS))
    for field, form in (("steps_per_s", ".0f"), ("step_ms", ".2f")):
        values = {tool: _values(rows, tool, field) for tool in TOOLS}
        yield ", ".join(f"{median(values[tool]):{form}}" if any(values[tool]) else "-" for tool in TOOLS)
        # Ratios within a turn, as the machine is not the same in the next one.
        ratios = {
            tool: [mine / plain for mine, plain in zip(values[tool], values[PLAIN], strict=False) if plain]
            for tool in (OURS, PEER)
        }
        yield ", ".join(f"{median(ratios[tool]):.3f}" if ratios[tool] else "-" for tool in ratios)


def _apart(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    kinds = {"rest_s": "processor time of start and end, s", "report_s": "of the report, where it is a command, s"}
    for field, title in kinds.items():
        yield (title, *(f"{median(_values(rows, tool, field)):.1f}" for tool in TOOLS))
    sizes = {"trace_bytes": "trace, KiB", "report_bytes": "report and summary, KiB"}
    for field, title in sizes.items():
        yield (title, *(f"{median(_values(rows, tool, field)) / _KIB:.0f}" for tool in TOOLS))


if __name__ == "__main__":
    main()
