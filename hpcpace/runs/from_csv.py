"""Runs of a CSV file as comparisons take them: a speed each, and nothing that explains it."""

from __future__ import annotations

from pathlib import Path

from hpcpace.core.text import NS_PER_S
from hpcpace.runs.conditions import Conditions
from hpcpace.runs.csv_form import CsvRun, read_csv
from hpcpace.runs.measured import MeasuredRun


def runs_of_csv(path: Path) -> list[MeasuredRun]:
    """Return the runs of a CSV file, those with a throughput alone with the time of one sample as their step.

    Such a time is not compared with that of a step, of which it is not known how many samples it has, or whose batch is
    known.

    Raises:
        UsageError: as of `read_csv`.
    """
    return [_run(path, run) for run in read_csv(path)]


def _run(path: Path, run: CsvRun) -> MeasuredRun:
    batch, step_ns = run.batch, run.step_ns
    is_per_sample = step_ns is None and not batch
    if step_ns is None:
        batch = batch or 1.0
        step_ns = batch * NS_PER_S / (run.throughput or 1.0)
    return MeasuredRun(
        path=f"{path}:{run.line} {run.run}",
        attempt=0,
        is_from_summary=True,
        is_final=True,
        p50_ns=step_ns,
        mean_ns=step_ns,
        log_p50_error=0.0,  # how long steps differ within the run is not said; the spread between runs has it
        log_mean_error=None,  # its one speed is judged once
        block_p50_ns=(),
        cv=None,
        samples_per_s=run.throughput,
        samples_per_step=batch,
        samples_unit="samples" if batch else "",
        num_steps=0,
        world_size=run.num_ranks,
        num_nodes=run.num_nodes,
        is_per_sample=is_per_sample,
        num_missing=0,
        hosts=run.nodes,
        mesh="",
        ranks=(),
        transfers=(),
        shares=None,
        amplification=(),
        waiting_share=None,
        audit=None,
        mode="",
        headline="",
        conditions=Conditions(
            name=run.run,
            job_name=run.job or run.run,
            begun_unix_ns=run.begun_unix_ns,
            work={"job": run.job} if run.job else {},
        ),
    )
