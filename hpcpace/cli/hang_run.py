"""`hpcpace hang RUN`: whether a run hangs by its own traces, also while it runs; one screen, or one JSON object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcpace.cli.hang_dumps import exit_code, hang_json, text_console
from hpcpace.config_sources import load_config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt, json_text, open_named_run
from hpcpace.core.text import NS_PER_S, format_duration, plural, rank_list
from hpcpace.diagnosis.records import read_run_record
from hpcpace.diagnosis.run_state import is_running, read_start
from hpcpace.hang.from_traces import JobRecords, read_records
from hpcpace.hang.search import hang_in, least_ns
from hpcpace.hang.views import FoundHang, JobView
from hpcpace.hang.words import describe
from hpcpace.report.sections.hang import print_hang
from hpcpace.report.terminal import line, notes


def report_run(path: Path, *, as_json: bool, is_verbose: bool) -> int:
    """Say whether a run hangs, who holds up whom, and return the exit code.

    Raises:
        TraceError: there is no run, or no trace of it can be read.
    """
    settings = load_config(file=None, environ=process_environ())
    named = open_named_run(path)
    attempts = [one for one in named.directory.attempts() if named.attempt in (None, one.number)]
    if not attempts:
        raise TraceError(f"{path} has no attempt: name a run in which ranks have recorded something")
    attempt, hang_s = attempts[-1], settings.diagnosis.hang_s
    records = read_records(attempt, hosts=read_run_record(attempt, []).hosts, memory_bytes=settings.report.memory_bytes)
    found = hang_in(records, hang_s=hang_s)
    job = records.view() if found is None else found.job
    if as_json:
        content = _content(attempt, records, found, job, hang_s)
        click.echo(json_text(content), nl=False)
    else:
        _print(attempt, records, found, job, hang_s)
        notes(text_console(), records.problems, rest="--verbose", is_verbose=is_verbose)
    hang = None if found is None else found.hang
    return exit_code(hang, is_whole=not records.missing, has_problems=bool(records.problems))


def _content(
    attempt: Attempt, records: JobRecords, found: FoundHang | None, job: JobView, hang_s: float
) -> dict[str, Any]:
    named = () if found is None else found.hang.culprits or found.hang.could_be
    return {
        "source": job.source,
        "run": str(attempt.path.parent),
        "attempt": attempt.number,
        "is_running": is_running(attempt, read_start(attempt, [])),
        "ranks": [rank.rank for rank in records.ranks],
        "missing": list(records.missing),
        "groups": {group.name: list(group.members) for group in job.groups},
        "now_ns": job.now_ns,
        "limit_ns": least_ns(job, hang_s=hang_s),
        "problems": list(records.problems),
        "hang": None if found is None else hang_json(found.hang, job),
        "stacks": {str(rank): list(job.ranks[rank].stack) for rank in named if job.ranks[rank].stack},
    }


def _print(attempt: Attempt, records: JobRecords, found: FoundHang | None, job: JobView, hang_s: float) -> None:
    console = text_console()
    limit = format_duration(least_ns(job, hang_s=hang_s))
    if found is not None:
        print_hang(console, describe(found.hang, job))
    else:
        whose = "" if not records.missing else " of the ranks with a trace"
        line(console, "Verdict", f"no hang: no operation{whose} has been open for {limit}", style="bold")
    state = "running" if is_running(attempt, read_start(attempt, [])) else "not running"
    after = format_duration(records.last_ns - job.now_ns) if records.last_ns - job.now_ns >= NS_PER_S else ""
    of = plural(records.world_size, "rank")
    read = f"traces of {len(records.ranks)} of {of}, attempt {attempt.number}, {state}"
    line(console, "Read", read + (f"; the last record is from {after} later" if after else ""))
    if records.missing:
        line(console, "Missing", f"{rank_list(records.missing)} left no trace")
