"""Lines, tables and wordings that all parts of a report share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.config import DiagnosisConfig
from hpcpace.metrics.open_operations import OpenOperation
from hpcpace.report.summary import Clocks, ClockSuspect, CutRank, Summary
from hpcpace.units import NS_PER_MS, format_bytes, format_duration

_LABEL_WIDTH = 11
_MOST_HOSTS = 4
DIRECTIVE = re.compile(r"#SBATCH --[a-z-]+=[\w.,\[\]-]*[\w\]]")
"""A line for a job script inside a sentence."""

_IN_FIGURES = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[kMGT]?B)(?!\w))")
_FIRST_PRIVATE = 0xE000  # private characters are not printable, so no text that is shown has one


def printable(text: str) -> str:
    """Return text from a file with everything escaped that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def title(console: Console, content: str, remark: str = "") -> None:
    """Print the heading of a section, after an empty line."""
    console.print()
    text = Text(printable(content), style="bold")
    if remark:
        text.append(f"  {remark}", style="not bold dim")
    console.print(text)


def line(console: Console, label: str, content: str, *, style: str = "") -> None:
    """Print a label and its content, wrapped beside it."""
    _hanging(console, Text(label.ljust(_LABEL_WIDTH), style="dim"), content, style=style)


def note(console: Console, content: str) -> None:
    """Print a remark below a table."""
    _hanging(console, Text("- "), content)


def _hanging(console: Console, label: Text, content: str, *, style: str = "") -> None:
    """Print text wrapped beside a label."""
    for index, part in enumerate(_wrapped(console, printable(content), max(console.width - len(label), 20))):
        console.print((label if index == 0 else Text(" " * len(label))) + Text(part, style=style), soft_wrap=True)


def _wrapped(console: Console, text: str, width: int) -> list[str]:
    """Return lines; a number stays with its unit, and a line for a job script stays whole, however long it is."""
    whole = DIRECTIVE.findall(text)
    # A word as long as each of them, but no longer than a line, stands for it.
    words = [chr(_FIRST_PRIVATE + 1 + index) * min(len(one), width) for index, one in enumerate(whole)]
    text = _IN_FIGURES.sub(chr(_FIRST_PRIVATE), text)
    for one, word in zip(whole, words, strict=True):
        text = text.replace(one, word, 1)
    lines = [part.plain.rstrip() for part in Text(text).wrap(console, width)]
    for one, word in zip(whole, words, strict=True):
        lines = [part.replace(word, one) for part in lines]
    return [part.replace(chr(_FIRST_PRIVATE), " ") for part in lines]


def table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table with a left column and numbers to its right."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.add_column(first, vertical="bottom")
    for name in others:
        made.add_column(name, justify="right", vertical="bottom")
    return made


def milliseconds(time_ns: float) -> str:
    """Return milliseconds with three significant digits, without their unit."""
    value = time_ns / NS_PER_MS
    if not value:
        return "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(share: float) -> str:
    """Return a share as percent."""
    return f"{100 * share:.1f} %"


def place_name(kind: str, name: str) -> str:
    """Return a place in the field's words: `rank 5`, `node n3`, `leaf switch leaf1`, `link n3`, `pipeline stage 2`."""
    if kind == "slot" and name.startswith("local"):
        return f"local rank {name.removeprefix('local')} of every node"
    if kind == "slot":
        return f"pipeline stage {name.removeprefix('pp')}"
    return printable(f"{'leaf switch' if kind == 'leaf' else kind} {name}".rstrip())


def alias_name(alias: str) -> str:
    """Return what the data cannot separate from a place, like `node n3`, in the field's words."""
    kind, _, name = alias.partition(" ")
    return place_name(kind, name)


def plural(count: int, noun: str) -> str:
    """Return `1 step` or `2 steps`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7` for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(names)}"


def named_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return ranks with their hosts, like `ranks 0-3 on n1, rank 7 on n2`; where all hosts are one, without it."""
    if len(set(hosts.values()) - {""}) < 2:
        return rank_list(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    if len(by_host) > _MOST_HOSTS:
        return f"{rank_list(ranks)} on {len(by_host)} hosts"
    names = [rank_list(some) + (f" on {printable(host)}" if host else "") for host, some in by_host.items()]
    return ", ".join(names)


def open_line(operation: OpenOperation, hosts: Mapping[int, str]) -> str:
    """Return one sentence on an operation that never completed."""
    where = f"{operation.op} {operation.seq} of group '{printable(operation.group)}' in step {operation.step}"
    parts = [f"{named_ranks(operation.inside, hosts)} inside for {format_duration(operation.age_ns)}"]
    parts += [f"{named_ranks(operation.completed, hosts)} completed it"] if operation.completed else []
    parts += [f"no record of it from {named_ranks(operation.absent, hosts)}"] if operation.absent else []
    return f"{where} never completed: {', '.join(parts)}"


def cut_rank_line(rank: CutRank, hosts: Mapping[int, str]) -> str:
    """Return one sentence on a rank whose trace is missing, was not closed, or lacks records."""
    who = named_ranks((rank.rank,), hosts)
    count, steps = plural(rank.num_lost_operations, "operation"), plural(rank.num_lost_steps, "step")
    if not rank.has_trace:
        ended = f" and ended {steps}" if rank.num_lost_steps else ""
        entered = f"; it entered at least {count}{ended}, as other ranks show" if rank.num_lost_operations else ""
        return f"{who}: no trace{entered}"
    parts = ["no step recorded" if rank.last_step is None else f"last step recorded {rank.last_step}"]
    parts[0] += f", {format_duration(rank.gap_ns)} before the last trace ends" if rank.gap_ns else ""
    if rank.num_lost_operations:
        ended = f" and {steps} that it had ended" if rank.num_lost_steps else ""
        parts.append(f"lost at least {count} that it had entered{ended}, as other ranks show")
    parts += [f"its recorder dropped {plural(rank.num_dropped, 'record')}"] if rank.num_dropped else []
    return f"{who}: {'; '.join(parts)}"


def changed_thresholds(summary: Summary) -> list[str]:
    """Return the thresholds of a summary that are not the defaults, with these: `straggler_share 0.1 (0.03)`."""
    usual = asdict(DiagnosisConfig())
    return [
        f"{name} {value:g} ({usual[name]:g})" for name, value in summary.settings.items() if value != usual.get(name)
    ]


def suspect_line(clocks: Clocks) -> str:
    """Return one sentence on clocks that are proven wrong; empty where none is."""
    if not clocks.num_wrong:
        return ""
    num_more = clocks.num_suspects - len(clocks.suspects)
    names = [printable(suspect.host) for suspect in clocks.suspects] + ([f"{num_more} more"] if num_more else [])
    bounds_ns = [max(suspect.ahead_ns, suspect.behind_ns) for suspect in clocks.suspects]
    if clocks.num_wrong != clocks.num_suspects:
        return _undecided(clocks, names, f"by at least {format_duration(max(bounds_ns))}")
    bound = f"wrong by at least {format_duration(min(bounds_ns))}"
    if len(names) > 1:
        return (
            f"the clocks of {listed(names)} are {bound}: no fewer explain what contradicts causality; times between "
            "them and others cannot be trusted"
        )
    suspect = clocks.suspects[0]
    is_short = suspect.num_against <= _MOST_HOSTS
    against = listed([printable(host) for host in suspect.against]) if is_short else f"{suspect.num_against} others"
    return (
        f"the clock of {names[0]} is {bound} against {against} ({_direction(suspect)}); times between {names[0]} and "
        "others cannot be trusted"
    )


def _undecided(clocks: Clocks, names: Sequence[str], bound: str) -> str:
    which = f"at least {clocks.num_wrong} of them are wrong, and which ones cannot be told"
    if clocks.num_suspects == 2:
        bound += f" ({names[0]} {_direction(clocks.suspects[0])})"
        which = "which one is wrong cannot be told"
    return f"the clocks of {listed(names)} contradict each other {bound}; {which}; times between them cannot be trusted"


def listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


def _direction(suspect: ClockSuspect) -> str:
    if suspect.ahead_ns and suspect.behind_ns:
        return "ahead and behind by turns"
    return "ahead" if suspect.ahead_ns else "behind"


def outcome_line(summary: Summary) -> str:
    """Return what a training came to and the most memory that a rank had; empty where neither is known."""
    parts = [summary.outcome] if summary.outcome else []
    on_device = max(summary.memory, key=lambda row: row.device_bytes, default=None)
    on_host = max(summary.memory, key=lambda row: row.rss_bytes, default=None)
    if on_device is not None and on_device.device_bytes:
        parts.append(f"at most {format_bytes(on_device.device_bytes)} of GPU memory (rank {on_device.rank})")
    if on_host is not None:
        parts.append(f"at most {format_bytes(on_host.rss_bytes)} of memory (rank {on_host.rank})")
    return ", ".join(parts)
