"""The lines of a history from a CSV file of runs that another tool has measured."""

from __future__ import annotations

from pathlib import Path

from hpcpace.core.errors import UsageError
from hpcpace.core.text import NS_PER_S, plural, printable
from hpcpace.runs.csv_form import CsvRun, read_csv
from hpcpace.runs.history_row import HistoryRow
from hpcpace.runs.history_series import without_a_place


def rows_of_csv(path: Path) -> list[HistoryRow]:
    """Return the lines of the runs of a CSV file, the oldest first; without dates, in the order of the file.

    Raises:
        UsageError: as of `read_csv`; or only some runs of a series have a date.
    """
    rows = [row_of_csv(run) for run in read_csv(path)]
    for row in without_a_place(rows):
        raise UsageError(
            f"{path}: {printable(row.run)} has no date, and others of job {printable(row.job)!r} have one: "
            "its place among them is not known; give all of them a date, or none"
        )
    return sorted(rows, key=lambda row: row.begun_unix_ns)


def row_of_csv(run: CsvRun) -> HistoryRow:
    """Return the line of a run of a CSV file.

    With a throughput alone, its step is that of one batch, or of one sample where there is no batch, either: such runs
    are a series of their own.
    """
    step_ns = run.step_ns if run.step_ns is not None else (run.batch or 1.0) * NS_PER_S / (run.throughput or 1.0)
    parts = (
        f"{run.num_ranks} ranks" if run.num_ranks else "",
        plural(run.num_nodes, "node") if run.num_nodes else "",
        "" if run.step_ns is not None or run.batch else "time of a sample",
    )
    return HistoryRow(
        run=f"{run.run} (line {run.line})",
        begun_unix_ns=run.begun_unix_ns,
        job=run.job or "all",
        kind=", ".join(filter(None, parts)),
        samples_per_step=run.batch,
        p50_ns=step_ns,
        mean_ns=step_ns,
        samples_per_s=run.throughput,
        num_ranks=run.num_ranks,
        num_nodes=len(run.nodes) or run.num_nodes,
        hosts=run.nodes,
    )
