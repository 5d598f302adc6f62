"""The table of docs/results/gpu.md, from the results that are kept here, or with "not yet measured" in each cell."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import pages
from experiments.gpu.place import ROOT
from experiments.gpu.runner import RESULTS, STEPS, Step

DOCUMENT = ROOT / "docs" / "results" / "gpu.md"
KEPT = Path(__file__).parent / RESULTS
UNMEASURED = "not yet measured"


def write_page(folders: Sequence[Path]) -> Path:
    """Keep the results of folders, of a step those of the last one, put them into the document, and return its path."""
    found = [json.loads((folder / RESULTS).read_text()) for folder in folders]
    if any(results["rehearsal"] for results in found):
        sys.exit("results of a rehearsal on CPUs say nothing about GPUs")
    if len(devices := {results["device"] for results in found}) > 1:
        sys.exit(f"results of different devices do not go into one table: {', '.join(sorted(devices))}")
    steps = {name: step for results in found for name, step in results["steps"].items()}
    kept = found[-1] | {"steps": dict(sorted(steps.items()))}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    DOCUMENT.write_text(with_results(DOCUMENT.read_text(), kept))
    return DOCUMENT


def kept_results() -> dict[str, Any] | None:
    """Return the results that are kept; None while there are none."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else None


def with_results(text: str, results: dict[str, Any] | None) -> str:
    """Return the document with the table of some results."""
    return pages.with_marked(text, "first light", table(results))


def table(results: dict[str, Any] | None) -> str:
    """Return where it was measured and a row for each cell, in Markdown."""
    where = "Nothing has been measured on a GPU yet."
    if results is not None:
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        where = f"Measured on {results['date']} on {results['device']}, {results['cores']} cores; {versions}."
    rows = []
    for step in STEPS:
        found = (results or {}).get("steps", {}).get(step.name)
        for number, (name, question) in enumerate(step.cells.items()):
            first = (f"{step.name}: {step.title}", f"{step.limit_s} s") if number == 0 else ("", "")
            rows.append([*first, question, _cell(step, name, found)])
    return f"{where}\n\n{pages.table(('step', 'limit', 'question', 'measured'), rows)}"


def _cell(step: Step, name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return UNMEASURED
    if name in found["figures"]:
        return re.sub(r"[|\s]+", " ", str(found["figures"][name])).strip()
    return f"{UNMEASURED}: {found['reason'] or 'step ' + step.name + ' left it out'}".replace("|", "/")
