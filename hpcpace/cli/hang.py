"""`hpcpace hang`: which ranks hold up which others, by traces of a run, or by dumps, reports, logs and stacks.

`hpcpace import flight-recorder` reads the same dumps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import (
    MIN_WIDTH,
    PATH,
    Decorated,
    Real,
    collect_less_garbage,
    headed,
    option,
    show,
    shown_progress,
    text_console,
    verbose,
    write_target,
)
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_CANNOT_TELL, EXIT_OK, EXIT_WARNING, TraceError, UsageError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import RUNS, Attempt, check_target, find_runs, json_text, open_named_run
from hpcpace.core.settings import load_config
from hpcpace.core.text import NS_PER_S, format_duration, listed, nanoseconds, plural, rank_list, shortened
from hpcpace.diagnosis.records import read_run_record
from hpcpace.diagnosis.run_state import is_running, newest_run, read_start
from hpcpace.diagnosis.settings import DiagnosisConfig, ReportConfig
from hpcpace.hang.activity import with_activity
from hpcpace.hang.from_traces import JobRecords, hang_in, hang_limit_ns, read_records, with_answers
from hpcpace.hang.verdict import call_name, describe, parts_of
from hpcpace.hang.views import Call, Hang, HangKind, JobView
from hpcpace.report.document import Document, Notes, Row, Section, Table, Verdict
from hpcpace.runs.imports.dump_view import LastOfRank, chrome_trace, first_ns, last_ns, last_of_ranks
from hpcpace.runs.imports.dumps import Dumps
from hpcpace.runs.imports.witnesses import (
    LABELS,
    Evidence,
    Witnesses,
    evidence_of,
    ignored_line,
    read_witnesses,
    taken_for,
)

_MAX_LETTERS = 480
"""Of a sentence: only those with names that somebody chose to fill the screen are longer."""
_MAX_ROWS = (16, 256)  # of ranks, on a terminal and on a page
_MAX_NAMES = 3
_Lines = list[tuple[str, Sequence[str]]]


def run_document(
    records: JobRecords, job: JobView, hang: Hang | None, *, attempt: int, is_running: bool, limit_ns: int
) -> Document:
    """Return what traces of a run say about a hang.

    Args:
        records: the traces.
        job: what they show of the job.
        hang: what holds it up; None where nothing does.
        attempt: the number of the attempt.
        is_running: whether the job still runs.
        limit_ns: how long an operation is open before it counts as hanging.
    """
    after_ns = records.last_ns - job.now_ns
    state = "running" if is_running else "not running"
    read = f"traces of {len(records.ranks)} of {plural(records.world_size, 'rank')}, attempt {attempt}, {state}"
    if after_ns >= NS_PER_S:
        read += f"; the last record is from {format_duration(after_ns)} later"
    lines: _Lines = [("Read", [read])]
    if records.missing:
        lines.append(("Missing", [f"{rank_list(records.missing)} left no trace"]))
    whose = " of the ranks with a trace" if records.missing else ""
    none = f"no hang: no operation{whose} has been open for {format_duration(limit_ns)}"
    verdict = _verdict(none, lines) if hang is None else _verdict_of(hang, job, lines)
    return _document(verdict, records.problems)


def witness_document(found: Witnesses, evidence: Evidence, span_ns: int) -> Document:
    """Return what dumps, reports, logs and stacks say about a hang, and the end of each dump, `span_ns` long."""
    hang, dumps, job = evidence.hang, found.dumps, evidence.job
    lines: _Lines = [(label, [line for name, line in evidence.told if name == label]) for label in LABELS]
    is_of_dumps = dumps is not None and found.is_of_dumps_alone
    lines.append(("Read", [_read_sentence(dumps, job)] if dumps is not None and is_of_dumps else taken_for(found)))
    lines.append(("Ignored", list(filter(None, [ignored_line(found)]))))
    if dumps is not None and dumps.missing:
        lines.append(("Missing", [f"{rank_list(dumps.missing)} left no dump"]))
    if hang is not None:
        verdict = _verdict_of(hang, job, lines)
    elif evidence.doubt:
        verdict = _verdict(f"cannot tell whether the job hangs: {evidence.doubt}", lines)
    else:
        whose = " of the ranks that left a dump" if dumps is not None and dumps.missing else ""
        verdict = _verdict(f"no hang: every operation{whose} has finished", lines)
    named = () if hang is None else hang.culprits or hang.could_be
    ends = None if dumps is None else _ends(last_of_ranks(dumps, span_ns), span_ns, named)
    return _document(verdict, problems_of(found, evidence), ends)


def problems_of(found: Witnesses, evidence: Evidence) -> list[str]:
    """Return what was wrong with the files that were read."""
    return [*(found.dumps.problems if found.dumps is not None else ()), *evidence.notes]


def _document(verdict: Verdict, problems: Sequence[str], *sections: Section | None) -> Document:
    remarks = Section("", [Notes(problems, is_folded=True, has_terms=False)])
    return Document(
        heading="",
        title="hpcpace hang",
        verdict=verdict,
        sections=[remarks, *filter(None, sections)],
        rest="--verbose",
        has_glossary=False,
    )


def _verdict(headline: str, lines: _Lines) -> Verdict:
    return Verdict(headline=headline, tag="no hang", lines=lines, has_terms=False)


def _verdict_of(hang: Hang, job: JobView, lines: _Lines) -> Verdict:
    words = describe(hang, job)
    of_hang: _Lines = [("Why", [*map(_cut, words.why)]), ("Next", [_cut(words.advice)])]
    return Verdict(headline=_cut(words.headline), tag="hang", lines=[*of_hang, *lines], has_terms=False)


def _cut(sentence: str) -> str:
    return shortened(sentence, max_letters=_MAX_LETTERS)


def _ends(rows: Sequence[LastOfRank], span_ns: int, named: Sequence[int]) -> Section:
    """Return the end of the record of each rank, with those that a verdict names first."""
    order = sorted(rows, key=lambda row: (row.rank not in named, row.rank))
    table = Table(
        ("rank", "finished", "open", "oldest open operation", "called"),
        [Row(_end_cells(row), ranks=str(row.rank), style="strong" if row.rank in named else "") for row in order],
        text=(3,),
        limits=_MAX_ROWS,
    )
    return Section("The end of the records", [table], lead=f"the last {format_duration(span_ns)}")


def _end_cells(row: LastOfRank) -> tuple[str, ...]:
    since = "" if row.since_ns is None else f"-{format_duration(row.since_ns)}" if row.since_ns else "last"
    return str(row.rank), str(row.num_finished), str(row.num_open), shortened(row.stands_in) or "none", since


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


_MAX_SPAN_S = 86_400
_MAX_WIDTH = 120


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
    inputs = headed(
        "What to read",
        option(
            "--ras",
            type=PATH,
            metavar="FILE",
            help="Read what ncclras printed, too, as text or JSON.",
            show_default="none",
        ),
    )
    output = headed(
        "Output",
        option(
            "--last",
            "span_s",
            type=Real(0, _MAX_SPAN_S, is_open=True),
            default=1.0,
            help="Show this many seconds before the last record of Flight Recorder dumps.",
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
    decorated: Decorated = inputs(output(function))
    return decorated


def report_dumps(paths: Sequence[Path], options: DumpOptions) -> int:
    """Read dumps, reports of RAS, logs and stacks, say what hangs, and return the exit code.

    Raises:
        TraceError: nothing can be read, or it is of several jobs.
        CannotTell: of no dump is it known which rank left it.
    """
    with shown_progress() as begin:
        found = read_witnesses(paths, options.ras, begin("read logs, in bytes"))
    dumps = found.dumps
    read = [*paths, options.ras, *(dump.path for dump in (dumps.by_rank.values() if dumps is not None else ()))]
    check_target(options.timeline, read, "--timeline")
    if dumps is None and options.timeline is not None:
        raise UsageError("--timeline needs Flight Recorder dumps: only they have the times of operations")
    evidence = evidence_of(found)
    span_ns = nanoseconds(options.span_s)
    if dumps is not None and options.timeline is not None:
        write_target(options.timeline, json.dumps(chrome_trace(dumps, span_ns)), "--timeline")
    document, data = witness_document(found, evidence, span_ns), json_text(_witness_content(found, evidence, span_ns))
    _show(document, data, as_json=options.as_json, is_verbose=options.is_verbose, written=options.timeline)
    is_whole = not evidence.doubt and not (dumps.missing if dumps is not None else evidence.missing)
    return exit_code(evidence.hang, is_whole=is_whole, has_problems=bool(problems_of(found, evidence)))


def exit_code(hang: Hang | None, *, is_whole: bool, has_problems: bool) -> int:
    """Return the exit code: a hang is a warning, as in a report; one whose cause is open cannot be judged."""
    if hang is not None:
        return EXIT_CANNOT_TELL if hang.kind is HangKind.UNKNOWN else EXIT_WARNING
    if not is_whole:
        return EXIT_CANNOT_TELL
    return EXIT_WARNING if has_problems else EXIT_OK


def _show(document: Document, data: str, **options: Any) -> None:
    show(document, data, console=text_console(log_width=MIN_WIDTH, max_width=_MAX_WIDTH), **options)


def hang_json(hang: Hang | None, job: JobView) -> dict[str, Any] | None:
    """Return a hang as values of JSON."""
    if hang is None:
        return None
    words = describe(hang, job)
    return {
        "kind": hang.kind.name.lower(),
        "culprits": list(hang.culprits),
        "could_be": list(hang.could_be),
        "sides": None if hang.sides is None else [list(side) for side in hang.sides],
        "reasons": [_reason_json(part, job) for part in parts_of(hang)],
        "extra": [_call_json(call, job) for call in hang.extra],
        "waiting": list(hang.waiting),
        "since_ns": hang.since_ns,
        "operation": _call_json(hang.call, job) if hang.call is not None else None,
        "chain": [_call_json(call, job) for call in hang.chain],
        "reason": hang.reason,
        "headline": words.headline,
        "why": list(words.why),
        "next": words.advice,
    }


def _reason_json(part: Hang, job: JobView) -> dict[str, Any]:
    return {
        "kind": part.kind.name.lower(),
        "culprits": list(part.culprits),
        "could_be": list(part.could_be),
        "operation": _call_json(part.call, job) if part.call is not None else None,
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


def _witness_content(found: Witnesses, evidence: Evidence, span_ns: int) -> dict[str, Any]:
    dumps, job = found.dumps, evidence.job
    by_rank = dumps.by_rank if dumps is not None else {}
    recorded = [view.rank for view in job.ranks.values() if view.is_recorded]
    return {
        "source": job.source,
        "ranks": sorted(by_rank) if dumps is not None else recorded,
        "missing": list(dumps.missing if dumps is not None else evidence.missing),
        "files": {str(rank): str(dump.path) for rank, dump in sorted(by_rank.items())},
        "taken_for": taken_for(found),
        "ignored": [str(path) for path in found.ignored],
        "versions": sorted({dump.version for dump in by_rank.values()}),
        "libraries": sorted({dump.library for dump in by_rank.values()} - {""}),
        "groups": {group.name: list(group.members) for group in job.groups},
        "num_operations": sum(len(dump.entries) for dump in by_rank.values()),
        "first_unix_ns": first_ns(dumps) if dumps is not None else 0,
        "last_unix_ns": last_ns(dumps) if dumps is not None else 0,
        "problems": problems_of(found, evidence),
        "doubt": evidence.doubt,
        **{label.lower(): [line for name, line in evidence.told if name == label] for label in LABELS},
        "hang": hang_json(evidence.hang, job),
        "last": [dataclasses.asdict(row) for row in last_of_ranks(dumps, span_ns)] if dumps is not None else [],
    }


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
    attempt, hang_s = attempts[-1], settings.of(DiagnosisConfig).hang_s
    records = read_records(
        attempt, hosts=read_run_record(attempt, []).hosts, memory_bytes=settings.of(ReportConfig).memory_bytes
    )
    goes_on = is_running(attempt, read_start(attempt, []))
    if (found := hang_in(records, hang_s=hang_s)) is not None:
        found = with_activity(with_answers(found, records, attempt) if goes_on else found, attempt, is_running=goes_on)
    job, hang = (records.view(), None) if found is None else (found.job, found.hang)
    limit_ns = hang_limit_ns(job.usual_step_ns, hang_s=hang_s)
    document = run_document(records, job, hang, attempt=attempt.number, is_running=goes_on, limit_ns=limit_ns)
    data = json_text(_run_content(attempt, records, job, hang, limit_ns, goes_on=goes_on))
    _show(document, data, as_json=as_json, is_verbose=is_verbose)
    return exit_code(hang, is_whole=not records.missing, has_problems=bool(records.problems))


def _run_content(
    attempt: Attempt, records: JobRecords, job: JobView, hang: Hang | None, limit_ns: int, *, goes_on: bool
) -> dict[str, Any]:
    named = () if hang is None else hang.culprits or hang.could_be
    return {
        "source": job.source,
        "run": str(attempt.path.parent),
        "attempt": attempt.number,
        "is_running": goes_on,
        "ranks": [rank.rank for rank in records.ranks],
        "missing": list(records.missing),
        "groups": {group.name: list(group.members) for group in job.groups},
        "now_ns": job.now_ns,
        "limit_ns": limit_ns,
        "problems": list(records.problems),
        "hang": hang_json(hang, job),
        "stacks": {str(rank): list(job.ranks[rank].stack) for rank in named if job.ranks[rank].stack},
    }


@click.command(cls=Command)
@click.argument("paths", metavar="[RUN | FILES...]", nargs=-1, type=PATH)
@dump_options
def command(
    paths: tuple[Path, ...], ras: Path | None, span_s: float, timeline: Path | None, as_json: bool, is_verbose: bool
) -> None:
    """Say which ranks hold up a job that no longer moves, in which operation, and since when.

    RUN is a run of hpcpace, also one that goes on; without it, the newest run in runs. FILES are what was saved of a
    hang, in any mixture, also folders: Flight Recorder dumps of PyTorch, reports of NCCL's RAS, logs with messages of
    torch's watchdog or of gloo, and stacks of py-spy.

    Exit codes: 0 nothing hangs; 1 the job hangs, or a file was left out; 2 bad input; 3 cannot tell
    why it hangs, or ranks left no record.
    """
    collect_less_garbage()
    paths = paths or (_newest(),)
    if _is_run(paths):
        if ras is not None or timeline is not None:
            raise UsageError(f"{paths[0]} is a run of hpcpace: --ras and --timeline go with Flight Recorder dumps")
        raise SystemExit(report_run(paths[0], as_json=as_json, is_verbose=is_verbose))
    options = DumpOptions(ras=ras, timeline=timeline, span_s=span_s, as_json=as_json, is_verbose=is_verbose)
    raise SystemExit(report_dumps(paths, options))


def _newest() -> Path:
    newest = newest_run(RUNS)
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
