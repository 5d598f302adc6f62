"""What `hpcpace hang` says on the terminal: of a run's traces, or of dumps, reports, logs and stacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from hpcpace.core.text import NS_PER_S, format_duration, listed, plural, rank_list, shortened
from hpcpace.hang.from_traces import JobRecords
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import Hang, JobView
from hpcpace.report.document import Document, Notes, Row, Section, Table, Verdict
from hpcpace.runs.imports.dump_view import LastOfRank, first_ns, last_ns, last_of_ranks
from hpcpace.runs.imports.dumps import Dumps
from hpcpace.runs.imports.witnesses import LABELS, Evidence, Witnesses, ignored_line, taken_for

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
