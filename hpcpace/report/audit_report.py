"""An audit on the terminal, in at most 30 lines, and as a page; a rule as `hpcpace audit explain` prints it."""

from __future__ import annotations

import dataclasses
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from hpcpace.audit import cpusets
from hpcpace.audit.findings import CANNOT_DETERMINE, AuditFinding, Severity, blocks, grouped, hosts_text, place_text
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.picture import pictures
from hpcpace.audit.picture_text import LEGEND, map_lines, matrix_lines, picture_lines, svg
from hpcpace.audit.rulebook import AuditResult, Binding, Rule
from hpcpace.core.hostlist import short_list
from hpcpace.core.rundir import json_text
from hpcpace.core.text import folded, plural, printable, shortened
from hpcpace.report.document import PAGE, TERMINAL, Block, Command, Document, Drawing, Facts, Notes, Section, Table
from hpcpace.report.document import Verdict as DocumentVerdict
from hpcpace.report.terminal import num_lines

MAX_LINES = 30
"""Of an audit in a job's log, without the pictures and tables that somebody asked for."""
_LABEL_LETTERS = 11
_MAX_SHORT = 3  # display: facts that are not known, and notes, of one line each
_MAX_RANKS_LETTERS = 30

_Alike = list[AuditFinding]


def audit_document(result: AuditResult, sections: Sequence[Section] = (), *, width: int = 80) -> Document:
    """Return what an audit found, with as much detail as a terminal has room for.

    First each finding gets a line, the most severe first, then its fix, then all that it says, and what it costs last.

    Args:
        result: of the audit.
        sections: what was asked for besides.
        width: of the terminal.
    """
    found = blocks(grouped(result.findings))
    # Each problem can have four pieces; so many of them surely fill the lines.
    details = range(4 * min(sum(map(_is_problem, found)), MAX_LINES) + 1)

    def num_lines_of(detail: int) -> int:
        return num_lines(_document(result, found, detail, width), width)

    document = _document(result, found, max(bisect_right(details, MAX_LINES, key=num_lines_of) - 1, 0), width)
    return dataclasses.replace(document, sections=(*document.sections, *sections))


def rule_section(rule: Rule) -> Section:
    """Return what a rule checks, why, and the fix."""
    letters = ", ".join(f"{letter} {Severity(letter).word}" for letter in rule.severities)
    finds = f"{letters}; U unknown if a fact cannot be read"
    return Section(
        f"{rule.id}  {rule.title}",
        (Facts([("reads", rule.reads), ("why", rule.why), ("fix", rule.fix), ("finds", finds)]),),
    )


def matrix_section(result: AuditResult) -> Section:
    """Return the classes of the paths between GPUs and adapters."""
    return Section("Paths", (Drawing(list(matrix_lines(result.matrices, result.hosts))),))


def map_section(job: AuditedJob) -> Section:
    """Return the cores of each rank."""
    return Section("Cores", (Drawing(list(map_lines(job))),), lead="# all cores of a column, + some, . none")


def picture_sections(job: AuditedJob, result: AuditResult) -> Iterator[Section]:
    """Yield the picture of each kind of host, and which rules did not apply."""
    drawn, num_left = pictures(job)
    left = f"{num_left} more kinds of hosts are not drawn: choose hosts with --from" if num_left else ""
    machines = [Drawing(list(picture_lines(picture)), svg([picture])) for picture in drawn]
    yield Section("Machine", (*machines, Notes([*(LEGEND if drawn else ()), left], has_terms=False)))
    by_reason: dict[str, list[str]] = {}
    for rule, reason in result.skipped.items():
        by_reason.setdefault(reason, []).append(rule)
    skipped = [f"{' '.join(rules)}: {reason}" for reason, rules in by_reason.items()]
    yield Section("Rules that did not apply", (Notes(skipped, has_terms=False),))


def _is_problem(block: _Alike) -> bool:
    return block[0].severity in (Severity.FAIL, Severity.WARNING)


def _document(result: AuditResult, found: Sequence[_Alike], detail: int, width: int) -> Document:
    counts = Counter(block[0].severity for block in found for _ in block)
    words = [plural(counts[severity], severity.word) for severity in Severity if counts[severity]]
    applied = f"{result.num_rules - len(result.skipped)} of {plural(result.num_rules, 'rule')} applied"
    left_out = folded([*result.missing, *result.problems], rest="--json")
    hosts = short_list(result.hosts)
    nodes, ranks = (
        plural(count, word) if count else ""
        for count, word in ((len(result.hosts), "node"), (result.num_ranks, "rank"))
    )
    return Document(
        heading="hpcpace audit",
        subject=hosts,
        title=f"Audit of {hosts}",
        verdict=DocumentVerdict(
            headline=", ".join(words) or "no findings",
            sure=", ".join(filter(None, (nodes, ranks, applied))),
            tag="audit",
            kind="" if any(map(_is_problem, found)) else "healthy",
        ),
        warnings=[("left out", shortened(text, max_letters=2 * (width - _LABEL_LETTERS))) for text in left_out],
        sections=(_findings_section(result, found, detail, width), _binding_section(result.bindings)),
        data=json_text(result.to_json()),
        data_name="audit.json",
        rest="--json",
        has_glossary=False,
    )


def _findings_section(result: AuditResult, found: Sequence[_Alike], detail: int, width: int) -> Section:
    problems = [block for block in found if _is_problem(block)]
    num = min(len(problems), MAX_LINES)
    pieces: list[Block | None] = []
    for place, block in enumerate(problems[: min(detail, num)], start=1):
        first, text, certainty = block[0], _description(block, result), f" [{block[0].certainty}]"
        if detail < 2 * num + place:
            text = _cut(text, width - _LABEL_LETTERS - len(certainty))
        cost = first.cost if detail >= 3 * num + place else ""
        line = first.evidence if detail >= 2 * num + place else ""
        pieces.append(Facts([(_label(block), text + certainty), ("line", line), ("costs", cost)], on=TERMINAL))
        if first.fix and detail >= num + place:
            pieces.append(Command("fix", _fix(first, result), on=TERMINAL))
    if detail < len(problems):
        rest = " ".join(dict.fromkeys(block[0].rule for block in problems[detail:]))
        more = f"{len(problems) - detail} more: {rest} (see --json, or `hpcpace audit explain ID`)"
        pieces.append(Notes([_cut(more, width - 2)], has_terms=False, on=TERMINAL))
    pieces += [Facts([fact], on=TERMINAL) for fact in _cut_facts([*_unknown(found), *_notes(found, result)], width)]
    head = ("finding", "where", "what", "costs", "fix")
    rows = [
        (
            _label(block),
            _where(block, result),
            "; ".join(filter(None, (f"{_seen(block)} [{block[0].certainty}]", block[0].evidence))),
            block[0].cost,
            block[0].fix,
        )
        for block in found
    ]
    return Section("Findings", (*pieces, Table(head, rows, text=range(5), command=4, on=PAGE)))


def _fix(finding: AuditFinding, result: AuditResult) -> str:
    option = result.bindings[0].option if result.bindings else ""
    return "the binding below" if option and option in finding.fix else finding.fix


def _label(block: _Alike) -> str:
    return f"{block[0].severity} {block[0].rule}"


def _description(block: _Alike, result: AuditResult) -> str:
    return ": ".join(filter(None, (_where(block, result), _seen(block))))


def _where(block: _Alike, result: AuditResult) -> str:
    hosts = tuple(dict.fromkeys(host for finding in block for host in finding.hosts))
    return ", ".join(filter(None, (place_text(block), _ranks(block, result), hosts_text(hosts, result.hosts))))


def _seen(block: _Alike) -> str:
    return block[0].seen + (f"; {len(block) - 1} more like it" if len(block) > 1 else "")


def _ranks(block: _Alike, result: AuditResult) -> str:
    """Return the ranks of the job that a block concerns; nothing for one host, or if it concerns all ranks."""
    ranks = {rank for finding in block for rank in finding.ranks}
    if len(result.hosts) < 2 or not ranks or len(ranks) == result.num_ranks:
        return ""
    text = shortened(cpusets.format_numbers(ranks), max_letters=_MAX_RANKS_LETTERS)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _unknown(found: Sequence[_Alike]) -> list[tuple[str, str]]:
    """Return the facts that are not known, by what they are, with the rules that lack them."""
    by_reason: dict[str, list[str]] = {}
    for block in found:
        if block[0].severity == Severity.UNKNOWN:
            by_reason.setdefault(block[0].seen, []).append(block[0].rule)
    rows = [(" ".join(("U", *rules)), reason) for reason, rules in by_reason.items()]
    rest = " ".join(rule for rules in list(by_reason.values())[_MAX_SHORT:] for rule in rules)
    return _short(rows, ("U", f"{rest} lack other facts, see --json"))


def _notes(found: Sequence[_Alike], result: AuditResult) -> list[tuple[str, str]]:
    notes = [block for block in found if block[0].severity == Severity.INFORMATION]
    rows = [(_label(block), _description(block, result)) for block in notes]
    return _short(rows, ("I", f"{len(notes) - _MAX_SHORT} more notes, see --json"))


def _short(rows: Sequence[tuple[str, str]], rest: tuple[str, str]) -> list[tuple[str, str]]:
    return [*rows[:_MAX_SHORT], rest] if len(rows) > _MAX_SHORT + 1 else list(rows)


def _cut_facts(rows: Sequence[tuple[str, str]], width: int) -> Iterator[tuple[str, str]]:
    """Yield rows that take one line each."""
    for label, text in rows:
        name = _cut(label, width // 2)
        yield name, _cut(text, width - max(len(name) + 1, _LABEL_LETTERS))


def _cut(text: str, most: int) -> str:
    return textwrap.shorten(printable(text), most, placeholder=" ...")


def _binding_section(bindings: Sequence[Binding]) -> Section:
    if not bindings:
        return Section("CPU binding", ())
    binding = bindings[0]
    reason = shortened(binding.reason)
    label = f"bind {binding.num_tasks} ranks per node"
    left = f"  # still reports {' '.join(binding.left)}" if binding.left else ""
    return Section(
        "CPU binding",
        (
            Command(label, f"srun {binding.option} ...{left}") if binding.option else None,
            Notes(
                [
                    f"{label}: {CANNOT_DETERMINE}{reason}" if not binding.option else "",
                    f"it does not follow the GPUs: {CANNOT_DETERMINE}{reason}" if binding.option and reason else "",
                    f"for 1 of {len(bindings)} kinds of nodes, see --json for the others" if len(bindings) > 1 else "",
                ],
                has_terms=False,
            ),
        ),
    )
