"""`hpcpace hang`: which ranks hold up which others, by traces of a run or by dumps.

`hpcpace import flight-recorder` reads the same dumps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hpcpace.cli.commands import Command
from hpcpace.cli.options import MIN_WIDTH, PATH, Decorated, Real, headed, option, text_console, verbose, write_target
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_CANNOT_TELL, EXIT_OK, EXIT_WARNING, TraceError, UsageError
from hpcpace.core.rundir import RUNS, Attempt, check_target, find_runs, json_text, open_named_run
from hpcpace.core.settings import load_config
from hpcpace.core.text import NS_PER_S, format_duration, listed, nanoseconds, plural, printable, rank_list, shortened
from hpcpace.diagnosis.records import read_run_record
from hpcpace.diagnosis.run_state import is_running, newest_run, read_start
from hpcpace.hang.from_traces import JobRecords, hang_in, hang_limit_ns, read_records
from hpcpace.hang.rules import find_hang
from hpcpace.hang.verdict import call_name, describe
from hpcpace.hang.views import Call, FoundHang, Hang, HangKind, JobView
from hpcpace.report.sections.hang import print_hang, print_last
from hpcpace.report.terminal import line, notes
from hpcpace.runs.imports.dump_view import chrome_trace, first_ns, job_view, last_ns, last_of_ranks
from hpcpace.runs.imports.dumps import Dumps, read_dumps
from hpcpace.runs.imports.ras import read_ras, with_witness

_MAX_SPAN_S = 86_400
_MAX_WIDTH = 120
_MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """What was asked for."""

    ras: Path | None
    timeline: Path | None
    span_s: float
    as_json: bool
    is_verbose: bool


def dump_options(function: Decorated) -> Decorated:
    """Add the options of both commands to one."""
    decorate: Callable[[Decorated], Decorated] = headed(
        "Dumps",
        option("--ras", type=PATH, metavar="FILE", help="Read what ncclras -f json printed, too.", show_default="none"),
        option(
            "--last",
            "span_s",
            type=Real(0, _MAX_SPAN_S, is_open=True),
            default=1.0,
            show_default=True,
            help="Show this many seconds before the last record.",
        ),
        option(
            "--timeline",
            type=PATH,
            metavar="FILE",
            help="Write these seconds as a timeline for ui.perfetto.dev.",
            show_default="none",
        ),
        option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
        verbose,
    )
    return decorate(function)


def report_dumps(paths: Sequence[Path], options: DumpOptions) -> int:
    """Read dumps, say what they hold and what hangs, and return the exit code.

    Raises:
        TraceError: nothing can be read, or the dumps are of several jobs.
        CannotTell: of no dump is it known which rank left it.
    """
    dumps = read_dumps(paths)
    read = [*paths, options.ras, *(dump.path for dump in dumps.by_rank.values())]
    check_target(options.timeline, read, "--timeline")
    job = job_view(dumps)
    told: tuple[str, ...] = ()
    if options.ras is not None:
        job, told = with_witness(job, read_ras(options.ras))
    hang = find_hang(job)
    span_ns = nanoseconds(options.span_s)
    if options.timeline is not None:
        write_target(options.timeline, json.dumps(chrome_trace(dumps, span_ns)), "--timeline")
    if options.as_json:
        content = _dumps_content(dumps, job, hang, told, span_ns)
        click.echo(json_text(content), nl=False)
    else:
        _print_dumps(_console(), dumps, job, hang, told, options)
        if options.timeline is not None:
            click.echo(f"\nwritten: {printable(str(options.timeline))}")
    return exit_code(hang, is_whole=not dumps.missing, has_problems=bool(dumps.problems))


def exit_code(hang: Hang | None, *, is_whole: bool, has_problems: bool) -> int:
    """Return the exit code: a hang is a warning, as in a report; one whose cause is open cannot be told."""
    if hang is not None:
        return EXIT_CANNOT_TELL if hang.kind is HangKind.UNKNOWN else EXIT_WARNING
    if not is_whole:
        return EXIT_CANNOT_TELL
    return EXIT_WARNING if has_problems else EXIT_OK


def _console() -> Console:
    return text_console(log_width=MIN_WIDTH, max_width=_MAX_WIDTH)


def hang_json(hang: Hang | None, job: JobView) -> dict[str, Any] | None:
    """Return a hang as values of JSON."""
    if hang is None:
        return None
    words = describe(hang, job)
    return {
        "kind": hang.kind.name.lower(),
        "culprits": list(hang.culprits),
        "could_be": list(hang.could_be),
        "waiting": list(hang.waiting),
        "since_ns": hang.since_ns,
        "operation": _call_json(hang.call, job) if hang.call is not None else None,
        "chain": [_call_json(call, job) for call in hang.chain],
        "reason": hang.reason,
        "headline": words.headline,
        "why": list(words.why),
        "next": words.advice,
    }


def _call_json(call: Call, job: JobView) -> dict[str, Any]:
    return {
        "name": call_name(call, job),
        "group": job.groups[call.channel.group].name,
        "op": call.op,
        "number": call.seq,
        "step": call.step,
        "where": call.where,
    }


def _dumps_content(dumps: Dumps, job: JobView, hang: Hang | None, told: Sequence[str], span_ns: int) -> dict[str, Any]:
    return {
        "source": job.source,
        "ranks": sorted(dumps.by_rank),
        "missing": list(dumps.missing),
        "files": {str(rank): str(dump.path) for rank, dump in sorted(dumps.by_rank.items())},
        "versions": sorted({dump.version for dump in dumps.by_rank.values()}),
        "libraries": sorted({dump.library for dump in dumps.by_rank.values()} - {""}),
        "groups": {group.name: list(group.members) for group in job.groups},
        "num_operations": sum(len(dump.entries) for dump in dumps.by_rank.values()),
        "first_unix_ns": first_ns(dumps),
        "last_unix_ns": last_ns(dumps),
        "problems": list(dumps.problems),
        "ras": list(told),
        "hang": hang_json(hang, job),
        "last": [dataclasses.asdict(row) for row in last_of_ranks(dumps, span_ns)],
    }


def _print_dumps(
    console: Console, dumps: Dumps, job: JobView, hang: Hang | None, told: Sequence[str], options: DumpOptions
) -> None:
    if hang is not None:
        print_hang(console, describe(hang, job))
    else:
        every = "every operation" if not dumps.missing else "every operation of the ranks that left a dump"
        line(console, "Verdict", f"no hang: {every} has finished", style="bold")
    for witness in told:
        line(console, "RAS", witness)
    line(console, "Read", _read_sentence(dumps, job))
    if dumps.missing:
        line(console, "Missing", f"{rank_list(dumps.missing)} left no dump")
    notes(console, dumps.problems, rest="--verbose", is_verbose=options.is_verbose)
    named = (hang.culprits or hang.could_be) if hang is not None else ()
    span_ns = nanoseconds(options.span_s)
    print_last(console, last_of_ranks(dumps, span_ns), span_ns, named=named)


def _few(names: Collection[str]) -> str:
    """Return names of software; there are one or two unless somebody made them up."""
    return listed([*map(shortened, sorted(names)[:_MAX_NAMES]), *(["others"] if len(names) > _MAX_NAMES else [])])


def _read_sentence(dumps: Dumps, job: JobView) -> str:
    entries = [entry for dump in dumps.by_rank.values() for entry in dump.entries]
    versions = _few({dump.version for dump in dumps.by_rank.values()})
    libraries = {dump.library for dump in dumps.by_rank.values()} - {""}
    software = [f"format {versions}", *([_few(libraries)] if libraries else [])]
    sentence = (
        f"dumps of {len(dumps.by_rank)} of {plural(dumps.world_size, 'rank')} ({', '.join(software)});"
        f" {plural(len(job.groups), 'group')}, {plural(len(entries), 'operation')}"
    )
    if not entries:
        return sentence
    first, last = first_ns(dumps), last_ns(dumps)
    until = datetime.fromtimestamp(last / NS_PER_S, UTC)
    return f"{sentence} in the {format_duration(last - first)} up to {until:%Y-%m-%d %H:%M:%S} UTC"


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
        content = _run_content(attempt, records, found, job, hang_s)
        click.echo(json_text(content), nl=False)
    else:
        _print_run(attempt, records, found, job, hang_s)
        notes(_console(), records.problems, rest="--verbose", is_verbose=is_verbose)
    hang = None if found is None else found.hang
    return exit_code(hang, is_whole=not records.missing, has_problems=bool(records.problems))


def _run_content(
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
        "limit_ns": hang_limit_ns(job.usual_step_ns, hang_s=hang_s),
        "problems": list(records.problems),
        "hang": None if found is None else hang_json(found.hang, job),
        "stacks": {str(rank): list(job.ranks[rank].stack) for rank in named if job.ranks[rank].stack},
    }


def _print_run(attempt: Attempt, records: JobRecords, found: FoundHang | None, job: JobView, hang_s: float) -> None:
    console = _console()
    limit = format_duration(hang_limit_ns(job.usual_step_ns, hang_s=hang_s))
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


@click.command(cls=Command)
@click.argument("paths", metavar="[RUN | DUMPS...]", nargs=-1, type=PATH)
@dump_options
def command(
    paths: tuple[Path, ...], ras: Path | None, span_s: float, timeline: Path | None, as_json: bool, is_verbose: bool
) -> None:
    """Say which ranks hold up a job that no longer moves, in which operation, and since when.

    RUN is a run of hpcpace, also one that goes on; without it, the newest run in runs. DUMPS are Flight Recorder dumps
    of PyTorch: a folder of them, or files, one a rank.

    Exit codes: 0 nothing hangs; 1 the job hangs, or a file was left out; 2 bad input; 3 cannot tell
    why it hangs, or ranks left no record.
    """
    paths = paths or (_newest(),)
    if _is_run(paths):
        if ras is not None or timeline is not None:
            raise UsageError(f"{paths[0]} is a run of hpcpace: --ras and --timeline go with Flight Recorder dumps")
        raise SystemExit(report_run(paths[0], as_json=as_json, is_verbose=is_verbose))
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json, is_verbose=is_verbose)
    raise SystemExit(report_dumps(paths, options))


def _newest() -> Path:
    try:
        newest = newest_run(find_runs(RUNS))
    except OSError:
        newest = None
    if newest is None:
        raise TraceError(f"no run in {RUNS}: name a run, or a folder of Flight Recorder dumps")
    return newest


def _is_run(paths: tuple[Path, ...]) -> bool:
    if len(paths) != 1:
        return False
    try:
        open_named_run(paths[0])
    except TraceError:  # it names the runs in a folder, which has no dumps then
        if _has_runs(paths[0]):
            raise
        return False
    return True


def _has_runs(path: Path) -> bool:
    try:
        return next(find_runs(path), None) is not None
    except OSError:
        return False
