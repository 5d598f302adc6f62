"""Runs the matrix: `python -m experiments.attach [--only ROW ...] [--write]`. All rows take about an hour on 2 cores.

The frameworks are those of --python, the public scripts those of the clones in --sources. `--write` keeps the results
in --results beside this program, and writes docs/results/attach.md from all that are kept there, of other days too.

Options:
  --python PATH       an interpreter with the frameworks; default: this one
  --sources PATH      a folder with clones of the public repositories
  --torchvision PATH  a folder with torchvision, where it is not with the frameworks
  --results PATH      a folder for runs and results [build/attach]
  --only ROW...       run only these
  --faults FAULT...   inject only these [compute loader host]
  --hold-s X          let faults sleep for so long [0.08]
  --reuse             run nothing without a fault that is there already
  --keep              run nothing; use the results that are there
  --write             keep the results, and write docs/results/attach.md
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.attach.judge import IN_PLACE, judge_fault, judge_runs
from experiments.attach.rows import FAULTS, ROWS, Row
from experiments.attach.runs import HOLD_S, Bench, CheckoutError, report
from experiments.jobs import commit
from experiments.options import command_line
from experiments.pages import ROOT, listed, table, today, write_page

_KEPT = Path(__file__).with_name("results")


def main() -> None:
    args = command_line(__doc__, only=[row.name for row in ROWS], faults=FAULTS)
    # No resolve(): the link in a virtual environment's bin is what makes it one.
    bench = Bench(
        python=(args.python or Path(sys.executable)).absolute(),
        sources=args.sources and args.sources.absolute(),
        torchvision=args.torchvision and args.torchvision.absolute(),
        folder=args.results.absolute(),
        reuse=args.reuse,
        hold_s=args.hold_s,
    )
    chosen = [row for row in ROWS if not row.refused and (not args.only or row.name in args.only)]
    for row in () if args.keep else chosen:
        begin_s = time.monotonic()
        result = run_row(bench, row, args.faults)
        (bench.folder / f"{row.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"[{time.monotonic() - begin_s:4.0f} s] {row.name}: {summary_line(result)}", flush=True)
    if args.write:
        for row in chosen:
            if (result := bench.folder / f"{row.name}.json").exists():
                shutil.copy(result, _KEPT)
        write_document(_KEPT)


def run_row(bench: Bench, row: Row, faults: list[str]) -> dict[str, Any]:
    """Run a row's script plainly, traced, and with each fault; return what was found, for JSON."""
    try:
        plain = bench.run(row, traced=False)
        traced = plain if plain.code else bench.run(row, traced=True)
        found = judge_runs(row, plain, traced)
        if not found.problems or plain.code == 0:
            verdict = (report(bench.python, traced.run_dir) or {}).get("verdict", {})
            found.mode = verdict.get("mode", "")
            if faults and bench.hold_s != HOLD_S:
                found.notes.append(f"faults sleep for {bench.hold_s:g} s")
            for fault in row.faults:
                if fault in faults:
                    ran = bench.run(row, traced=True, fault=fault)
                    found.faults[fault] = judge_fault(row, fault, report(bench.python, ran.run_dir))
    except CheckoutError as error:
        return {"untested": str(error)}
    return {**found.to_json(), "versions": versions(bench.python, row), "commit": commit(ROOT), "date": today()}


def versions(python: Path, row: Row) -> dict[str, str]:
    """Return the versions of what a row uses."""
    names = ("torch", *row.packages)
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True)
    found = dict(zip(names, done.stdout.split(), strict=False))
    return found | {"Python": platform.python_version(), "Linux": platform.release()}


def summary_line(result: dict[str, Any]) -> str:
    """Return a result in one line."""
    if "untested" in result:
        return f"untested: {result['untested']}"
    phases = ", ".join(f"{name} {share:+.1%}" for name, share in result["phases"].items())
    faults = "; ".join(f"{name} {'ok' if ok else 'WRONG'}: {said}" for name, (ok, said) in result["faults"].items())
    return (
        f"{'; '.join(result['problems']) or 'ok'} | steps {result['steps']} | samples {result['samples']} | "
        f"{phases} | {faults}"
    )


def write_document(results: Path) -> None:
    """Write the page from a folder with a JSON file for each row that has run."""
    found = {row: _read(results / f"{row.name}.json") for row in ROWS}
    done = [result for result in found.values() if result and "untested" not in result]
    sources = sorted({f"{row.source.repository} at `{row.source.commit}`" for row in found if row.source})
    write_page(
        "attach",
        matrix=_matrix(found),
        details=listed(
            f"**{row.title}**: {'; '.join(said)}" for row, result in found.items() if (said := [*_remarks(row, result)])
        ),
        origins=listed(_origins(done)),
        sources="; ".join(sources),
    )


def _origins(done: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the rows of each day ran with."""
    for date in sorted({result["date"] for result in done}):
        of_day = [result for result in done if result["date"] == date]
        commits = ", ".join(sorted({result["commit"] for result in of_day}))
        versions = {f"{name} {version}" for result in of_day for name, version in result["versions"].items()}
        yield f"{date}: hpcpace at {commits}, {', '.join(sorted(versions, key=str.lower))}"


def status(row: Row, result: dict[str, Any] | None) -> str:
    """Return "works", "with a note", "does not work", "refused" or "untested"."""
    if row.refused:
        return "refused"
    if result is None or "untested" in result:
        return "untested"
    if result["problems"]:
        return "does not work" if _is_broken(result) else "with a note"
    missing = any(fault not in result["faults"] or not result["faults"][fault][0] for fault in FAULTS)
    return "with a note" if row.note or missing else "works"


def _is_broken(result: dict[str, Any]) -> bool:
    """Whether the job itself came out differently, or its steps are wrong: nothing that a note could excuse."""
    return any(
        problem.startswith(("losses", "exit code", "steps", "without tracing")) or "have a trace" in problem
        for problem in result["problems"]
    )


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _matrix(found: dict[Row, dict[str, Any] | None]) -> str:
    lines = []
    for row, result in found.items():
        cells = [row.title, status(row, result), "", "", "", "", "", ""]
        if result is not None and "untested" not in result:
            cells[2:] = [
                result["date"],
                str(row.num_ranks),
                result["steps"],
                result["samples"],
                _phases(result),
                _faults(row, result),
            ]
        lines.append(cells)
    named = "rank and stage named: compute, loader, host"
    return table(("what", "status", "tried", "ranks", "steps", "samples", "phases against the profiler", named), lines)


def _phases(result: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:+.1%}" for name, share in result["phases"].items())
    if "the profiler did not run" in result["notes"]:
        return "not profiled"
    return shares.replace("%", " %") or "all shorter than 1 ms"


def _faults(row: Row, result: dict[str, Any]) -> str:
    def cell(name: str) -> str:
        if name not in result["faults"]:
            is_missing = name not in row.faults
            return "not run" if not is_missing else "no loader" if name == "loader" else "no place"
        is_right, said = result["faults"][name]
        return "yes" if is_right else "not first" if IN_PLACE in said else "no"

    return ", ".join(map(cell, FAULTS))


def _remarks(row: Row, result: dict[str, Any] | None) -> Iterator[str]:
    if row.note:
        yield row.note.rstrip(".")
    if row.refused:
        yield row.refused.rstrip(".")
    elif result is None:
        yield "has not run"
    elif "untested" in result:
        yield result["untested"]
    else:
        yield from result["problems"]
        yield from (note for note in result["notes"] if not note.startswith("hpcpace:"))  # our own last line
        for fault, (is_right, said) in result["faults"].items():
            if not is_right:
                yield f"with the fault {fault} the report says “{said}”"


if __name__ == "__main__":
    main()
