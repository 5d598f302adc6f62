"""The audit as text for a terminal or a log, and the differences between two snapshots of a node.

A machine that nobody has changed has no differences: counters, loads and clocks change by themselves and are compared
on request only, and sizes of memory count as equal up to the few pages that a kernel keeps for itself.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Snapshot
from hpcpace.audit.findings import CANNOT_DETERMINE, AuditFinding, Severity, blocks, grouped, hosts_text, place_text
from hpcpace.audit.hardware import parsed
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.result import AuditResult, Binding, PathMatrix
from hpcpace.audit.rulebook import Rule
from hpcpace.audit.tree import Unreadable
from hpcpace.core.codec import plain
from hpcpace.core.text import folded, printable

_KEYS = ("address", "name", "number", "rank", "index")
# Facts that are new in every snapshot, or only say how it was taken.
_IGNORED = ("taken_unix_ns", "schema", "hpcpace_version", "unreadable", "is_live", "counters/window_s")
_MISSING = "-"
_MEMORY = ("memory_kb", "memory_bytes", "shm_bytes")
_MEMORY_TOLERANCE = 0.01
"""Less than the smallest memory module of a node with 64 of them; kernels of one version differ by 0.1 %."""

_CHANGING = re.compile(r"boot_id|counters/.*|gpus/.*/nvml/(replays|throttle_reasons|utilization_percent)")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact that differs; `-` means that a snapshot lacks it."""

    host: str
    fact: str
    before: str
    after: str


def differences(before: Snapshot, after: Snapshot, *, with_counters: bool = False) -> list[Difference]:
    """Return the facts in which two snapshots differ, sorted by name.

    Args:
        before, after: the snapshots.
        with_counters: whether to compare counters and what else changes by itself, and memory to the byte.
    """
    old, new = dict(_facts(plain(before), "")), dict(_facts(plain(after), ""))
    found = []
    idle = set() if with_counters else {*_idle_speeds(before), *_idle_speeds(after)}
    for fact in sorted({*old, *new} - idle):
        one, other = old.get(fact, _MISSING), new.get(fact, _MISSING)
        if fact.startswith(_IGNORED) or one == other:
            continue
        if not with_counters and (_CHANGING.fullmatch(fact) or (fact.endswith(_MEMORY) and _is_close(one, other))):
            continue
        found.append(Difference(host=after.host, fact=fact, before=_text(one), after=_text(other)))
    return found


def _idle_speeds(snapshot: Snapshot) -> Iterator[str]:
    """Yield the speeds of links that an idle GPU lowers."""
    for device in snapshot.hardware.pci or ():
        if device.kind != "nic":
            yield f"hardware/pci/{device.address}/speed_gts"


def _is_close(before: Any, after: Any) -> bool:
    if not isinstance(before, int) or not isinstance(after, int):
        return False
    return abs(before - after) <= _MEMORY_TOLERANCE * max(before, after)


def _facts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each single value with its path; rows are identified by a key field, not by their position."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            key = next((item[name] for name in _KEYS if isinstance(item, Mapping) and name in item), None)
            label = (
                "+".join(str(item[name]) for name in ("level", "kind", "cpus") if name in item) if key is None else key
            )
            yield from _facts(item, f"{path}/{label}")
    else:
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return printable("unreadable" if value is None else str(value))[:120]


MAX_LINES = 30
WIDTH = 100
SEVERITY_WORDS = {
    Severity.FAIL: "fail",
    Severity.WARNING: "warning",
    Severity.UNKNOWN: "unknown",
    Severity.INFORMATION: "note",
}
_INDENT = " " * 6
_FOLDERS = re.compile(r"(?<!\S)/(?:[^\s/]+/)+")
_MAX_MAP_COLUMNS = 64


def verdict_lines(result: AuditResult) -> list[str]:
    """Return the verdict in at most 30 lines; only fixes, which are for pasting, may be wider than 100 columns."""
    found = blocks(grouped(result.findings))
    worst = [block for block in found if block[0].severity in (Severity.FAIL, Severity.WARNING)]
    notes = [block for block in found if block[0].severity == Severity.INFORMATION]
    unknown = [block for block in found if block[0].severity == Severity.UNKNOWN]
    head = [_summary(result, found), *_left_out_lines(result)]
    tail = [*_unknown_lines(unknown, result), *_note_lines(notes, result), *_binding_lines(result.bindings)]
    room = MAX_LINES - len(head) - len(tail)
    return [printable(line) for line in [*head, *_fitting_lines(worst, result, room), *tail]]


def prolog_line(result: AuditResult, fail_on: Sequence[str]) -> str:
    """Return the one line of a prolog: what the rules of `fail_on` found, or that they found nothing."""
    found = [
        finding
        for finding in result.findings
        if finding.rule in fail_on and finding.severity in (Severity.FAIL, Severity.WARNING)
    ]
    if not found:
        if not fail_on:
            return "hpcpace audit: --fail-on names no rules"
        return f"hpcpace audit: no findings of {','.join(fail_on)}"
    texts = [" ".join(filter(None, (finding.rule, finding.place, finding.seen))) for finding in found[:3]]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return printable(f"hpcpace audit: {'; '.join(texts)}{more}")


def matrix_lines(matrices: Sequence[PathMatrix], all_hosts: Sequence[str]) -> Iterator[str]:
    """Yield the class of the path of each GPU to each adapter; as `NODE/PHB` where NCCL uses another class."""
    if not matrices:
        yield "no path matrix: there is no GPU or no adapter, or PCI cannot be read"
    for matrix in matrices:
        where = hosts_text(matrix.hosts, all_hosts)
        yield f"GPU x adapter, physical/NCCL{f' ({where})' if where else ''}"
        header = ["", *(printable(nic) for nic in matrix.nics)]
        rows = [header]
        for gpu, physical, nccl in zip(matrix.gpus, matrix.class_physical, matrix.class_nccl, strict=True):
            cells = [one if one == other else f"{one}/{other}" for one, other in zip(physical, nccl, strict=True)]
            rows.append([f"GPU {printable(gpu)}", *cells])
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def map_lines(job: AuditedJob) -> Iterator[str]:
    """Yield for each host which cores each rank may run on: `#` all cores of a column, `+` some, `.` none."""
    for host in job.hosts:
        yield printable(f"{host.name}: rank x core, | separates NUMA nodes")
        try:
            yield from _map_of(host)
        except Unreadable as error:
            yield printable(f"  {CANNOT_DETERMINE}{host.explain(error)}")


def explanation(rule: Rule) -> str:
    """Return a rule as `hpcpace audit explain` prints it."""
    letters = ", ".join(f"{letter} {SEVERITY_WORDS[Severity(letter)]}" for letter in rule.severities)
    parts = [
        f"{rule.id}  {rule.title}",
        _wrapped("reads ", rule.reads),
        _wrapped("why   ", rule.why),
        _wrapped("fix   ", rule.fix),
        _wrapped("finds ", f"{letters}; U unknown if a fact cannot be read"),
    ]
    return "\n".join(parts)


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False)


def _summary(result: AuditResult, found: Sequence[Sequence[AuditFinding]]) -> str:
    counts = {severity: sum(len(block) for block in found if block[0].severity == severity) for severity in Severity}
    parts = [_plural(count, SEVERITY_WORDS[severity]) for severity, count in counts.items() if count]
    return (
        f"hpcpace audit: {', '.join(parts) or 'no findings'}"
        f" ({_plural(len(result.hosts), 'node')}, {_plural(result.num_ranks, 'rank')},"
        f" {result.num_rules - len(result.skipped)} of {_plural(result.num_rules, 'rule')} applied)"
    )


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _left_out_lines(result: AuditResult) -> list[str]:
    texts = [*result.missing, *result.problems]
    return [_cut(_with_short_path(f"  left out: {text}")) for text in folded(texts, rest="--json")]


def _with_short_path(line: str) -> str:
    """Return a line in which the first path loses its folders if the line would not fit otherwise."""
    return line if len(line) <= WIDTH else _FOLDERS.sub(".../", line, count=1)


def _fitting_lines(found: Sequence[Sequence[AuditFinding]], result: AuditResult, room: int) -> list[str]:
    """Return as much of each block as fits, the most severe first: one line each, fixes, whole heads, then costs."""
    shown = found if len(found) <= room else found[: room - 1]
    heads = [_head(block, result) for block in shown]
    brief = [head if len(head) == 1 else [_brief(block, result)] for head, block in zip(heads, shown, strict=True)]
    fixes = [_fix_lines(block[0], result) for block in shown]
    costs = [_lines(f"{_INDENT}costs  ", block[0].cost) for block in shown]
    parts: list[list[list[str]]] = [[head, [], []] for head in brief]
    left = room - len(shown) - (len(shown) < len(found))
    for place, wanted in ((2, fixes), (0, heads), (1, costs)):
        for index, lines in enumerate(wanted):
            more = len(lines) - len(parts[index][place])
            if more <= left:
                parts[index][place] = lines
                left -= more
    lines = [line for block in parts for part in block for line in part]
    if len(shown) < len(found):
        rest = " ".join(dict.fromkeys(block[0].rule for block in found[len(shown) :]))
        lines.append(_cut(f"{len(found) - len(shown)} more: {rest} (see --json, or `hpcpace audit explain ID`)"))
    return lines


def _fix_lines(group: AuditFinding, result: AuditResult) -> list[str]:
    option = result.bindings[0].option if result.bindings else ""
    if option and option in group.fix:
        return [f"{_INDENT}fix    the binding below"]
    return [f"{_INDENT}fix    {group.fix}"] if group.fix else []


def _head(block: Sequence[AuditFinding], result: AuditResult) -> list[str]:
    return _lines(_label(block), f"{_description(block, result)} [{block[0].certainty}]")


def _brief(block: Sequence[AuditFinding], result: AuditResult) -> str:
    """Return a head on one line, cut if it is too long."""
    label, end = _label(block), f" [{block[0].certainty}]"
    return f"{label}{_cut(_description(block, result), WIDTH - len(label) - len(end))}{end}"


def _label(block: Sequence[AuditFinding]) -> str:
    return f"{block[0].severity} {block[0].rule} "


def _description(block: Sequence[AuditFinding], result: AuditResult) -> str:
    hosts = tuple(dict.fromkeys(host for group in block for host in group.hosts))
    places = (place_text(block), _ranks_text(block, result), hosts_text(hosts, result.hosts))
    where = ", ".join(filter(None, places))
    more = f"; {len(block) - 1} more like it" if len(block) > 1 else ""
    return printable(f"{where}: {block[0].seen}{more}" if where else f"{block[0].seen}{more}")


def _ranks_text(block: Sequence[AuditFinding], result: AuditResult) -> str:
    """Return the ranks of the job that a block concerns; nothing for one host, or if it concerns all ranks."""
    ranks = {rank for group in block for rank in group.ranks}
    if len(result.hosts) < 2 or not ranks or len(ranks) == result.num_ranks:
        return ""
    text = cpusets.format_numbers(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {text if len(text) <= 30 else f'{text[:30]}...'}"


def _lines(label: str, text: str) -> list[str]:
    """Return a text behind a label, wrapped to three lines at most."""
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=label,
        subsequent_indent=_INDENT,
        max_lines=3,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _unknown_lines(found: Sequence[Sequence[AuditFinding]], result: AuditResult) -> list[str]:
    if not found:
        return []
    by_reason: dict[str, list[str]] = {}
    for block in found:
        reason = block[0].seen.removeprefix(CANNOT_DETERMINE)
        by_reason.setdefault(reason, []).append(block[0].rule)
    lines = [_cut(f"U {' '.join(rules)} {CANNOT_DETERMINE}{reason}") for reason, rules in by_reason.items()]
    if len(lines) > 4:
        rest = " ".join(rule for rules in list(by_reason.values())[3:] for rule in rules)
        lines = [*lines[:3], _cut(f"U {rest} lack other facts, see --json")]
    return lines


def _note_lines(found: Sequence[Sequence[AuditFinding]], result: AuditResult) -> list[str]:
    lines = [_cut(_head(block, result)[0]) for block in found]
    return [*lines[:3], f"I {len(lines) - 3} more notes, see --json"] if len(lines) > 4 else lines


def _binding_lines(bindings: Sequence[Binding]) -> list[str]:
    lines = []
    for binding in bindings[:1]:
        others = f" (1 of {len(bindings)} kinds of nodes, see --json for the others)" if len(bindings) > 1 else ""
        label = f"Bind {binding.num_tasks} ranks per node{others}"
        if not binding.option:
            lines.append(_cut(f"{label}: {CANNOT_DETERMINE}{binding.reason}"))
            continue
        left = f"  # still reports {' '.join(binding.left)}" if binding.left else ""
        lines += [f"{label}:", f"  srun {binding.option} ...{left}"]
        if binding.reason:
            lines.append(_cut(f"  which does not follow the GPUs: {CANNOT_DETERMINE}{binding.reason}"))
    return lines


def _cut(text: str, most: int = WIDTH) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _map_of(host: AuditedHost) -> Iterator[str]:
    view = host.hardware
    cores = sorted(view.cores, key=lambda core: core & -core)
    by_node = [[core for core in cores if core & cpus] for _, cpus in sorted(view.numa_cpus.items())]
    each = max(1, -(-len(cores) // _MAX_MAP_COLUMNS))
    if each > 1:
        yield f"  each column is {each} cores"
    for rank in host.ranks:
        mask = parsed(rank.cpus, "the CPUs of a rank")
        parts = ("".join(_mark(own[at : at + each], mask) for at in range(0, len(own), each)) for own in by_node)
        yield f"  rank {rank.rank:<5} {'|'.join(parts)}  {cpusets.format_list(mask)}"
    if not host.ranks:
        yield "  no ranks"


def _mark(cores: Sequence[int], mask: int) -> str:
    used = sum(1 for core in cores if core & mask)
    return "." if not used else "#" if used == len(cores) else "+"
