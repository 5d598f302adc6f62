"""Runs the matrix: `python -m experiments.attach [--only ROW ...] [--write]`. All rows take about an hour on 2 cores.

The frameworks are those of --python, the public scripts those of the clones in --sources. Results of rows are kept in
--results, so that the document can be written from several calls; `--write` writes docs/results/attach.md from all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.attach.document import write_document
from experiments.attach.judge import judge_fault, judge_runs
from experiments.attach.rows import FAULTS, ROWS, Row
from experiments.attach.runs import HOLD_S, Bench, CheckoutError, report

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "attach.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="an interpreter with the frameworks")
    parser.add_argument("--sources", type=Path, help="a folder with clones of the public repositories")
    parser.add_argument(
        "--torchvision", type=Path, help="a folder with torchvision, where it is not with the frameworks"
    )
    parser.add_argument("--results", type=Path, required=True, help="a folder for runs and results")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS], help="run only these")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), help="inject only these")
    parser.add_argument("--hold-s", type=float, default=HOLD_S, help=f"let faults sleep for so long; default {HOLD_S}")
    parser.add_argument("--reuse", action="store_true", help="run nothing without tracing where that is there already")
    parser.add_argument("--keep", action="store_true", help="run nothing; use the results that are there")
    parser.add_argument("--write", action="store_true", help="write docs/results/attach.md from all results")
    args = parser.parse_args()
    # No resolve(): the link in a virtual environment's bin is what makes it one.
    bench = Bench(
        python=args.python.absolute(),
        sources=args.sources and args.sources.absolute(),
        torchvision=args.torchvision and args.torchvision.absolute(),
        folder=args.results.absolute(),
        reuse=args.reuse,
        hold_s=args.hold_s,
    )
    for row in () if args.keep else [row for row in ROWS if not args.only or row.name in args.only]:
        begin_s = time.monotonic()
        result = run_row(bench, row, args.faults)
        (bench.folder / f"{row.name}.json").write_text(json.dumps(result, indent=2))
        print(f"[{time.monotonic() - begin_s:4.0f} s] {row.name}: {summary_line(result)}", flush=True)
    if args.write:
        write_document(DOCUMENT, bench.folder)


def run_row(bench: Bench, row: Row, faults: list[str]) -> dict[str, Any]:
    """Run a row's script plainly, traced, and with each fault; return what was found, for JSON."""
    try:
        plain = bench.run_plainly(row)
        traced = bench.run(row, traced=True)
        found = judge_runs(row, plain, traced)
        if not found.problems or plain.code == 0:
            verdict = (report(bench.python, traced.run_dir) or {}).get("verdict", {})
            found.mode = verdict.get("mode", "")
            for fault in row.faults:
                if fault in faults:
                    ran = bench.run(row, traced=True, fault=fault)
                    found.faults[fault] = judge_fault(fault, report(bench.python, ran.run_dir))
    except CheckoutError as error:
        return {"untested": str(error), "commit": commit()}
    return {**found.to_json(), "versions": versions(bench.python, row), "commit": commit()}


def versions(python: Path, row: Row) -> dict[str, str]:
    """Return the versions of the distributions that a row uses."""
    names = ("torch", *row.packages)
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True)
    return dict(zip(names, done.stdout.split(), strict=False))


def commit() -> str:
    """Return the commit of this repository that ran."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=DOCUMENT.parent, capture_output=True, text=True)
    return done.stdout.strip()


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


if __name__ == "__main__":
    main()
