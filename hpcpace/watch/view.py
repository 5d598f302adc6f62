"""The live view of a run, or of one of its ranks, and the keys that change it."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcpace.core.text import (
    NS_PER_S,
    format_count,
    format_duration,
    format_rate,
    percent,
    plural,
    rank_list,
    shell_word,
)
from hpcpace.watch.state import Doing, HangState, JobState, RankDoing, RankState

_STYLES = {
    Doing.RUNNING: "bold green",
    Doing.FINISHED: "bold",
    Doing.ENDED: "bold",
    Doing.HANGS: "bold red",
    Doing.FAILED: "bold red",
    Doing.REMOVED: "bold red",
    Doing.SILENT: "bold red",
}
_WIDE = 120
_MAX_RANGES = 60
_MIN_ROWS = 5
_STALE_S = 3.0
_HELD_S, _HELD_STEPS = 2.0, 5
_SLOW_CHANGE = 0.1

_AS_USUAL = frozenset({RankDoing.LIVE, RankDoing.ENDED, RankDoing.UNSEEN})


class Sort(StrEnum):
    """What ranks are sorted by."""

    SLOWEST = "slowest"
    RANK = "rank"
    WAIT = "waiting"
    SILENT = "silent"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user has chosen to see.

    Attributes:
        sort: order of the ranks.
        cursor: place of the marked rank in that order.
        opened: whether the marked rank is shown alone.
        is_help: whether the keys are explained.
    """

    sort: Sort = Sort.SLOWEST
    cursor: int = 0
    opened: bool = False
    is_help: bool = False


_KEYS: dict[Sort, Callable[[RankState], tuple[float, int]]] = {
    Sort.SLOWEST: lambda one: (-_or_least(one.excess), one.rank),
    Sort.RANK: lambda one: (0.0, one.rank),
    Sort.WAIT: lambda one: (-_or_least(one.wait_ns), one.rank),
    Sort.SILENT: lambda one: (-one.silent_s - (0 if one.doing == RankDoing.LIVE else 1e-9), one.rank),
}


def _or_least(value: float | None) -> float:
    return -1e18 if value is None else value


def ordered(state: JobState, sort: Sort) -> list[RankState]:
    """Return the ranks in the order of the view: silent ones come first where the slowest do."""
    ranks = sorted(state.ranks, key=_KEYS[sort])
    if sort != Sort.SLOWEST:
        return ranks
    return sorted(ranks, key=lambda one: one.doing in _AS_USUAL)


def page(
    state: JobState, choice: Choice, *, width: int, height: int | None, age_s: float = 0.0, has_keys: bool = False
) -> RenderableType:
    """Return the view.

    Args:
        state: of the run.
        choice: what to show of it.
        width, height: of the terminal; without a height, all that matters is shown.
        age_s: seconds since the state was seen.
        has_keys: whether keys can be pressed.
    """
    lines = [*_head(state, age_s), *_job(state, width)]
    if state.hang is not None:
        lines += _hang(state.hang)
    lines += [Text(f"note: {note}", style="yellow", no_wrap=True, overflow="ellipsis") for note in state.notes]
    foot = [_keys_line(choice)] if has_keys else []
    if choice.is_help:
        return Group(*lines, Text(""), *_help())
    ranks = ordered(state, choice.sort)
    if choice.opened and ranks:
        return Group(*lines, Text(""), *_rank_page(ranks[min(choice.cursor, len(ranks) - 1)]), *foot)
    used = sum(_num_lines(line, width) for line in lines) + len(foot) + 3
    num_hosts = min(len(state.hosts), 4 if height is not None else 16)
    room = 16 if height is None else max(height - used - (num_hosts + 2 if num_hosts else 0), _MIN_ROWS)
    parts: list[RenderableType] = list(lines)
    if ranks:
        parts += [Text(""), _ranks(ranks, choice, width=width, room=room, has_keys=has_keys, step_ns=state.step_ns)]
    if num_hosts:
        parts += [Text(""), _hosts(state, num_hosts)]
    return Group(*parts, *foot)


def _num_lines(line: Text, width: int) -> int:
    return 1 if line.no_wrap else max(-(-line.cell_len // width), 1)


def _head(state: JobState, age_s: float) -> Iterator[Text]:
    where = f", attempt {state.attempt}" if state.num_attempts > 1 else ""
    head = Text(overflow="ellipsis", no_wrap=True)
    head.append(state.doing.upper(), style=_STYLES.get(state.doing, "bold yellow"))
    job = f"  job {state.jobid}" if state.jobid else ""
    head.append(f"  {state.path}{where}{job}")
    yield head
    if age_s > _STALE_S + state.look_s:
        yield Text(f"no look at the files has ended for {age_s:.0f} s: the file system is slow", style="bold yellow")
    if state.doing == Doing.NOT_STARTED:
        yield Text(f"no attempt in {state.path} yet: the job has not started, or its run is elsewhere", style="yellow")
    elif state.doing == Doing.REMOVED:
        yield Text("the run was removed; this is what was seen last", style="yellow")
    elif state.doing == Doing.STARTING:
        yield Text("no rank has begun to record yet", style="yellow")
    elif state.doing == Doing.SILENT:
        yield Text("no rank writes any more: its ranks were killed or stopped, or their hosts are gone", style="red")
    elif not state.ranks:
        yield Text(f"nothing is written any more: hpcpace report {shell_word(state.path)} says how it went")


def _job(state: JobState, width: int) -> Iterator[Text]:
    """Yield the lines on the whole job, each as many of its parts as fit."""
    if not state.ranks and not state.num_steps:
        return
    for label, parts in (("steps", _steps(state)), ("waits", _waits(state)), ("ranks", _ranks_line(state))):
        line = Text(f"{label}  ", style="")
        used = len(label) + 2
        for number, (text, style) in enumerate(part for part in parts if part[0]):
            if number and used + len(text) + 3 > width:
                line.append("\n" + " " * (len(label) + 2))
                used = len(label) + 2
            elif number:
                line.append(" | ")
                used += 3
            line.append(text, style=style)
            used += len(text)
        yield from line.split("\n")
    if state.pacing:
        yield Text(state.pacing)


def _steps(state: JobState) -> Iterator[tuple[str, str]]:
    planned = "" if state.planned_steps is None else f" of {state.planned_steps}"
    spread = state.most_steps - state.num_steps
    yield f"{state.num_steps}{planned}" + (f" (some ranks {spread} ahead)" if spread > 1 else ""), "bold"
    if state.step_ns is not None and state.rate is not None:
        yield f"{format_duration(state.step_ns)} a step, {state.rate:.3g}/s", ""
    if state.change is not None and state.past_ns is not None:
        style = "bold yellow" if state.change >= _SLOW_CHANGE else ""
        yield f"{100 * state.change:+.1f} % against its past {format_duration(state.past_ns)}", style
    if state.sample_rate:
        yield f"{format_count(state.sample_rate)} {state.samples_unit}/s", ""
    if state.eta_s is not None:
        yield f"done in {_duration(state.eta_s)}", ""
    if (
        state.step_age_s is not None
        and state.step_ns is not None
        and state.step_age_s > _HELD_STEPS * state.step_ns / NS_PER_S
    ):
        yield f"the present step has lasted {_duration(state.step_age_s)}", "bold yellow"
    if state.last_step_unix_s is not None and state.num_live == 0:
        yield f"last step ended {_date(state.last_step_unix_s)}", ""


def _waits(state: JobState) -> Iterator[tuple[str, str]]:
    if state.wait_share is None or state.blocked_share is None:
        yield "no step was looked at in detail yet", "dim"
    else:
        age = f" (of the last {_duration(state.detail_s)})" if state.detail_s is not None and state.detail_s > 5 else ""
        yield f"exposed wait {percent(state.wait_share)} of a step{age}", ""
        yield f"blocked in communication {percent(state.blocked_share)}", ""
    if state.halfwidth_ns:
        yield f"clock error at most {format_duration(state.halfwidth_ns)}", ""


def _ranks_line(state: JobState) -> Iterator[tuple[str, str]]:
    ended = f", {state.num_ended} ended" if state.num_ended else ""
    yield f"{state.num_live} of {state.world_size} live{ended}", ""
    if state.silent:
        yield f"silent: {_short(state.silent)}", "bold red"
    if state.missing:
        yield f"no file: {_short(state.missing)}", "bold yellow"
    yield f"{format_count(state.num_dropped)} rows dropped", "bold yellow" if state.num_dropped else ""
    if state.looked_s > _STALE_S:
        yield f"each looked at within {_duration(state.looked_s)}", ""


def _short(ranks: tuple[int, ...]) -> str:
    names = rank_list(ranks)
    return names if len(names) <= _MAX_RANGES else plural(len(ranks), "rank")


def _hang(hang: HangState) -> Iterator[Text]:
    yield Text(hang.headline, style="bold red")
    for line in hang.why:
        yield Text(f"  {line}")
    yield Text(f"  {hang.advice}", style="bold")
    if hang.found_s > 2:
        yield Text(f"  (found {_duration(hang.found_s)} ago)", style="dim")


def _ranks(
    ranks: list[RankState], choice: Choice, *, width: int, room: int, has_keys: bool, step_ns: float | None
) -> Table:
    held_s = max(_HELD_S, _HELD_STEPS * (step_ns or 0.0) / NS_PER_S)
    is_wide = width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", width=width)
    table.add_column("rank", justify="right")
    if is_wide:
        table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=32)
    for name in ("step", "own", "excess", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("blocked", justify="right", no_wrap=True)
        table.add_column("age", justify="right", no_wrap=True)
    table.add_column("what", ratio=1, no_wrap=True, overflow="ellipsis")
    cursor = min(choice.cursor, len(ranks) - 1)
    first = max(0, min(cursor - room // 2, len(ranks) - room))
    for place, one in list(enumerate(ranks))[first : first + room]:
        cells = [str(one.rank)]
        if is_wide:
            cells.append(one.host)
        cells += [str(one.step) if one.step >= 0 else "-", _time(one.own_ns), _signed(one.excess), _time(one.wait_ns)]
        if is_wide:
            cells += [_time(one.blocked_ns), "-" if one.detail_age_s is None else _duration(one.detail_age_s)]
        style = "reverse" if has_keys and place == cursor else ""
        table.add_row(*(Text(cell) for cell in cells), Text(_what(one, held_s), style=_what_style(one)), style=style)
    if len(ranks) > room:
        table.add_row(*[Text("")] * (len(table.columns) - 1), Text(f"{len(ranks) - room} more", style="dim"))
    return table


def _what(one: RankState, held_s: float) -> str:
    """Return what a rank does; one whose step has lasted for `held_s` is shown by what it is in now."""
    if one.doing == RankDoing.SILENT:
        return f"silent for {_duration(one.silent_s)}" + (f"; in {one.open_calls[0]}" if one.open_calls else "")
    if one.doing != RankDoing.LIVE:
        return f"{one.doing}{': ' + one.problem if one.problem else ''}"
    dropped = f"; {format_count(one.num_dropped)} rows dropped" if one.num_dropped else ""
    if (one.step_age_s or 0.0) < held_s:
        return one.reason + dropped
    return (f"in {one.open_calls[0]}" if one.open_calls else "in no operation") + dropped


def _what_style(one: RankState) -> str:
    if one.doing in (RankDoing.SILENT, RankDoing.DAMAGED, RankDoing.NO_FILE):
        return "red"
    return "yellow" if one.reason.startswith("own work") else ""


def _hosts(state: JobState, num_hosts: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("host", "interface"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=32)
    for name in ("sent", "received", "of line rate"):
        table.add_column(name, justify="right", no_wrap=True)
    hosts = sorted(state.hosts, key=lambda one: (-(one.share or 0), -max(one.sent_bps, one.received_bps)))
    for one in hosts[:num_hosts]:
        share = "unknown" if one.share is None else percent(one.share)
        cells = (one.host, one.interface, format_rate(one.sent_bps), format_rate(one.received_bps), share)
        table.add_row(*map(Text, cells))
    if len(hosts) > num_hosts:
        table.add_row(Text(f"{len(hosts) - num_hosts} more", style="dim"))
    return table


def _rank_page(one: RankState) -> Iterator[Text]:
    yield Text(f"rank {one.rank} on {one.host or 'an unknown host'}: {one.doing}", style="bold")
    if one.problem:
        yield Text(one.problem, style="red")
    age = "" if one.step_age_s is None else f", which had lasted {_duration(one.step_age_s)} at the last flush"
    yield Text(f"in step {one.step}{age}" if one.step >= 0 else f"before its first step{age}")
    if one.silent_s:
        yield Text(f"silent for {_duration(one.silent_s)}", style="red")
    if one.own_ns is not None and one.detail_age_s is not None:
        yield Text(
            f"a step, seen {_duration(one.detail_age_s)} ago: own work {_time(one.own_ns)}"
            f" ({_signed(one.excess)} against its role), blocked {_time(one.blocked_ns)},"
            f" of that waiting for others {_time(one.wait_ns)}"
        )
    for name, time_ns in sorted(one.phases_ns.items(), key=lambda item: -item[1]):
        yield Text(f"  {name:<12}{_time(time_ns):>10}")
    for call in one.open_calls:
        yield Text(f"  open: {call}", no_wrap=True, overflow="ellipsis")
    if one.num_dropped:
        yield Text(f"{format_count(one.num_dropped)} rows dropped", style="yellow")
    if one.reason:
        yield Text(one.reason, style="bold")


def _keys_line(choice: Choice) -> Text:
    back = "enter: all ranks" if choice.opened else "enter: open the rank"
    return Text(
        f"q: quit  s: sort ({choice.sort})  up/down: mark  {back}  ?: keys",
        style="dim",
        no_wrap=True,
        overflow="ellipsis",
    )


def _help() -> Iterator[Text]:
    for key, what in (
        ("q", "quit"),
        ("s", "sort by the next of: " + ", ".join(Sort)),
        ("up, down, k, j", "mark another rank"),
        ("page up, page down", "mark one ten places away"),
        ("enter", "open the marked rank, or go back"),
        ("?", "show or leave this page"),
    ):
        yield Text(f"{key:<20}{what}")
    yield Text("own: time of a step in which the rank was not blocked in communication; excess: own against its role;")
    yield Text("wait: time blocked beyond that of the least blocked rank of its role; age: since it was looked at.")


def _time(time_ns: float | None) -> str:
    return "-" if time_ns is None else format_duration(time_ns)


def _signed(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _duration(time_s: float) -> str:
    """Return seconds as people read them: `58 ms`, `8 s`, `3:05 min`, `2:30 h`, `3 days 4 h`."""
    whole = round(time_s)
    if time_s < 0.95:
        return f"{1000 * time_s:.0f} ms"
    if whole < 60:
        return f"{time_s:.1f} s" if time_s < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    minutes = whole // 60
    if minutes < 48 * 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes // 1440} days {minutes % 1440 // 60} h"


def _date(unix_s: float) -> str:
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, OSError, ValueError):
        return "at an impossible time"


_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"q": "q", b"Q": "q", b"s": "s", b"?": "?", b"h": "?",
}  # fmt: skip
_MOVES = {"up": -1, "down": 1, "page up": -10, "page down": 10}
_MAX_BYTES = 64


def key_names(content: bytes) -> list[str]:
    """Return the names of the keys whose bytes a terminal has sent; others are left out."""
    found = []
    while content:
        known = max((code for code in _NAMES if content.startswith(code)), key=len, default=content[:1])
        if known in _NAMES:
            found.append(_NAMES[known])
        content = content[len(known) :]
    return found


def after_key(choice: Choice, key: str, num_ranks: int) -> Choice | None:
    """Return what is shown after a key; None if it quits."""
    if key == "q":
        return None
    if key == "?":
        return replace(choice, is_help=not choice.is_help)
    if key == "escape":
        return replace(choice, opened=False, is_help=False)
    if key == "enter":
        return replace(choice, opened=not choice.opened and not choice.is_help, is_help=False)
    if key == "s":
        sorts = list(Sort)
        return replace(choice, sort=sorts[(sorts.index(choice.sort) + 1) % len(sorts)], cursor=0, opened=False)
    return replace(choice, cursor=min(max(choice.cursor + _MOVES[key], 0), max(num_ranks - 1, 0)))


class Keyboard:
    """Reads keys from a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def keys(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed, as soon as there is one or the time is over."""
        try:
            if not select.select([self._descriptor], [], [], max(timeout_s, 0.0))[0]:
                return []
            content = os.read(self._descriptor, _MAX_BYTES)
        except InterruptedError:
            return []
        return key_names(content) if content else ["q"]  # the terminal is gone


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Let a terminal send each key at once and show none of them, until the block ends."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
