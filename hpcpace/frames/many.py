"""Many runs as one frame, a row per run, with what `hpcpace compare`, `history` and `scale` know of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpace.core.errors import TraceError, UsageError, check_package
from hpcpace.core.hostlist import short_list
from hpcpace.core.rundir import find_runs, open_named_run
from hpcpace.metrics.phases import Part
from hpcpace.runs.load import LoadedRun, load_runs, runs_of_csv
from hpcpace.runs.measured import MeasuredRun

if TYPE_CHECKING:
    from pandas import DataFrame

_FIGURES = ("attempt", "p50_ns", "mean_ns", "cv", "samples_per_s", "samples_per_step", "samples_unit", "num_steps")
_OTHERS = ("world_size", "num_missing", "num_nodes", "mesh", "mode", "emulation", "is_final")
_CONDITIONS = ("job_name", "begun_unix_ns", "dtype", "commit", "tool")
_SHARES = ("busy_share", "exposed_wait_share", "transfer_share", "other_share")
_PARTS = tuple(part.name.lower() for part in Part)
COLUMNS = (
    *("path", "name", *_CONDITIONS, *_FIGURES, *_OTHERS, "hosts", "work", *_SHARES),
    *(f"{part}_ns" for part in _PARTS),
    "problem",
)
"""The columns, as docs/python.md describes them."""


def load_many(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataFrame:
    """Return a frame with a row per run: speed, size, conditions, verdict and where the step goes.

    A run is taken from its summary.json where that is of its traces as they are, else it is analysed. Figures are NaN
    where they are not known, and of a run that cannot be loaded: `problem` says why.

    Args:
        paths: runs, folders of runs, and CSV files of runs that another tool has measured (docs/history.md).
        progress: called with the number of runs done and of all.

    Raises:
        UsageError: pandas is not installed, there is no run, or a CSV file cannot be used.
    """
    check_package("pandas", extra="frames")
    import pandas as pd

    named = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    tables = [path for path in named if _is_table(path)]
    found = list(_runs_of(path for path in named if not _is_table(path)))
    if not found and not tables:
        raise UsageError("there is no run to load: name runs, or folders of runs")
    rows = [_row(run) for run in load_runs(found, progress=progress)] if found else []
    rows += [_figures(run) for path in tables for run in runs_of_csv(path)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if name.endswith(("_ns", "_share", "_per_s", "_per_step")) or name == "cv"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == ".csv" and not path.is_dir()


def _runs_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the runs that paths mean: themselves, or those in a folder of runs."""
    for path in paths:
        try:
            open_named_run(path)
        except TraceError:
            inside = sorted(find_runs(path)) if path.is_dir() else []
            yield from inside or [path]
        else:
            yield path


def _row(run: LoadedRun) -> dict[str, Any]:
    if run.measured is None:
        return {"path": str(run.path), "name": run.path.name, "problem": run.problem}
    return {**_figures(run.measured), "problem": run.problem}


def _figures(run: MeasuredRun) -> dict[str, Any]:
    known = [rank.parts_ns for rank in run.ranks if rank.parts_ns is not None]
    parts = {
        f"{part}_ns": sum(values[part] for values in known) / len(known)
        for part in _PARTS
        if known and all(part in values for values in known)
    }
    return {
        "path": run.path,
        "name": run.conditions.name or run.name,
        **{name: getattr(run.conditions, name) for name in _CONDITIONS},
        **{name: getattr(run, name) for name in (*_FIGURES, *_OTHERS)},
        "begun_unix_ns": run.conditions.begun_unix_ns or None,
        "hosts": short_list(run.hosts),
        "work": "; ".join(f"{name}={value}" for name, value in sorted(run.conditions.work.items())),
        **dict(zip(_SHARES, run.shares or (), strict=False)),
        **parts,
        "problem": "",
    }
