"""Writes docs/results/attach.md: the prose, and the matrix from the results of the rows."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.attach.judge import IN_PLACE
from experiments.attach.rows import FAULTS, ROWS, Row

_PROSE = Path(__file__).with_name("prose")


def write_document(path: Path, results: Path) -> None:
    """Write the document.

    Args:
        path: where to.
        results: folder with a JSON file for each row that has run.
    """
    found = {row: _read(results / f"{row.name}.json") for row in ROWS}
    parts = [_prose("head"), _matrix(found), _prose("rows"), _details(found), _made_with(found), _prose("limits")]
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def status(row: Row, result: dict[str, Any] | None) -> str:
    """Return "works", "with a note", "does not work" or "untested"."""
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
    lines = [
        "| what | status | steps | samples | phases against the profiler | rank and stage named: "
        "compute, loader, host |",
        "|---|---|---|---|---|---|",
    ]
    for row, result in found.items():
        cells = [row.title, status(row, result)]
        if result is None or "untested" in result:
            cells += ["", "", "", ""]
        else:
            cells += [result["steps"], result["samples"], _phases(result), _faults(row, result)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _phases(result: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:+.1%}" for name, share in result["phases"].items())
    return shares.replace("%", " %") or "all shorter than 1 ms"


def _faults(row: Row, result: dict[str, Any]) -> str:
    def cell(name: str) -> str:
        if name not in result["faults"]:
            return "no place" if row.faults and name not in row.faults else "not run"
        is_right, said = result["faults"][name]
        return "yes" if is_right else "not first" if IN_PLACE in said else "no"

    return ", ".join(map(cell, FAULTS))


def _details(found: dict[Row, dict[str, Any] | None]) -> str:
    lines = []
    for row, result in found.items():
        said = list(_remarks(row, result))
        if said:
            lines.append(f"- **{row.title}**: {'; '.join(said)}")
    return "\n".join(lines)


def _remarks(row: Row, result: dict[str, Any] | None) -> Iterator[str]:
    if row.note:
        yield row.note.rstrip(".")
    if result is None:
        yield "has not run"
    elif "untested" in result:
        yield result["untested"]
    else:
        yield from result["problems"]
        yield from (note for note in result["notes"] if not note.startswith("hpcpace:"))  # our own last line
        for fault, (is_right, said) in result["faults"].items():
            if not is_right:
                yield f"with the fault {fault} the report says “{said}”"


def _made_with(found: dict[Row, dict[str, Any] | None]) -> str:
    done = [result for result in found.values() if result and "untested" not in result]
    versions = sorted({f"{name} {version}" for result in done for name, version in result["versions"].items()})
    commits = sorted({result["commit"] for result in done})
    sources = sorted({f"{row.source.repository} at `{row.source.commit}`" for row in found if row.source})
    return (
        "Written by `python -m experiments.attach --python VENV/bin/python --sources CLONES --results FOLDER --write` "
        f"on {time.strftime('%Y-%m-%d')}: hpcpace at {', '.join(commits)}, {', '.join(versions)}, "
        f"Python {platform.python_version()}, Linux {platform.release()}. Public scripts: {'; '.join(sources)}."
    )


def _prose(name: str) -> str:
    return (_PROSE / f"{name}.md").read_text()
