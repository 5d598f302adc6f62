"""Reads the runs of a scaling series: runs of hpcpace, or one CSV file of another tool's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcpace.core.errors import UsageError, with_reasons
from hpcpace.runs.csv_form import read_csv
from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.samples import Sample, sample_of_line, sample_of_run


def read_samples(
    paths: Sequence[Path], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Sample], list[str]]:
    """Return the runs at some paths, and why others cannot be read, a sentence each.

    Args:
        paths: of runs, or of one CSV file.
        progress: called with the number of runs read and of all.

    Raises:
        UsageError: CSV files and runs are mixed, several CSV files are named, or no run can be read.
    """
    tables = [path for path in paths if path.suffix.lower() == ".csv"]
    if tables and len(paths) > 1:
        raise UsageError(f"{tables[0]} is a CSV file: name it alone, its speeds were measured in another way")
    if tables:
        return [sample_of_line(line, str(tables[0])) for line in read_csv(tables[0])], []
    loaded = load_runs(paths, progress=progress)
    problems = [run.message for run in loaded if run.message]
    samples = [sample_of_run(run.measured) for run in loaded if run.measured is not None]
    if not samples:
        raise UsageError(with_reasons("no run can be read", problems))
    return samples, problems
