"""The live view of a run, or of one of its ranks, and the keys that change it."""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum

from hpcpace.core.records import dataclass
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
from hpcpace.report.document import Block, Cell, Document, Facts, Notes, Row, Section, Table
from hpcpace.report.terminal import num_lines
from hpcpace.watch.state import Doing, HangState, JobState, RankDoing, RankState

_STYLES = {
    Doing.RUNNING: "good",
    Doing.FINISHED: "strong",
    Doing.ENDED: "strong",
    Doing.HANGS: "bad",
    Doing.FAILED: "bad",
    Doing.REMOVED: "bad",
    Doing.SILENT: "bad",
}
_WIDE = 120
_MAX_RANGES, _MAX_NAME = 60, 32
_MIN_ROWS, _NUM_LINES_AROUND = 5, 4
"""The fewest ranks that are shown, and the lines around them: an empty one, a title, the head, and how many more."""
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
) -> Document:
    """Return the view.

    Args:
        state: of the run.
        choice: what to show of it.
        width, height: of the terminal; without a height, all that matters is shown.
        age_s: seconds since the state was seen.
        has_keys: whether keys can be pressed.
    """
    head = Section("", [_head(state, age_s), _job(state), *_hang(state.hang), Notes(state.notes, title="note")])
    foot = Section("", [Notes([_keys_line(choice)])] if has_keys else [])
    if choice.is_help:
        return _document(head, _help())
    ranks = ordered(state, choice.sort)
    if choice.opened and ranks:
        return _document(head, _rank_page(ranks[min(choice.cursor, len(ranks) - 1)]), foot)
    hosts = _hosts(state, 4 if height is not None else 16)
    used = num_lines(_document(head, hosts, foot), width)
    room = 16 if height is None else max(height - used - _NUM_LINES_AROUND, _MIN_ROWS)
    table = _ranks(ranks, choice, is_wide=width >= _WIDE, room=room, has_keys=has_keys, step_ns=state.step_ns)
    return _document(head, table, hosts, foot)


def _document(*sections: Section) -> Document:
    return Document(heading="", title="hpcpace watch", sections=sections, rest="--json", has_glossary=False)


def _head(state: JobState, age_s: float) -> Facts:
    where = f", attempt {state.attempt}" if state.num_attempts > 1 else ""
    job = f"  job {state.jobid}" if state.jobid else ""
    style = _STYLES.get(state.doing, "warn")
    rows = [(Cell(state.doing.upper(), style=style), Cell(f"{state.path}{where}{job}"))]
    if age_s > _STALE_S + state.look_s:
        slow = f"no look at the files has ended for {age_s:.0f} s: the file system is slow"
        rows.append((Cell(""), Cell(slow, style="warn")))
    return Facts([*rows, (Cell(""), _remark(state))])


def _remark(state: JobState) -> Cell:
    """Return what a run that is not under way is waiting for, or how it ended; empty where it is under way."""
    if state.doing == Doing.NOT_STARTED:
        waits_for = f"no attempt in {state.path} yet: the job has not started, or its run is elsewhere"
        return Cell(waits_for, style="warn")
    if state.doing == Doing.REMOVED:
        return Cell("the run was removed; this is what was seen last", style="warn")
    if state.doing == Doing.STARTING:
        return Cell("no rank has begun to record yet", style="warn")
    if state.doing == Doing.SILENT:
        gone = "no rank writes any more: its ranks were killed or stopped, or their hosts are gone"
        return Cell(gone, style="bad")
    over = f"nothing is written any more: hpcpace report {shell_word(state.path)} says how it went"
    return Cell("" if state.ranks else over)


def _job(state: JobState) -> Facts:
    """Return the facts on the whole job; what is unusual about it has a line of its own below the others."""
    if not state.ranks and not state.num_steps:
        return Facts([])
    rows: list[tuple[str, Cell]] = []
    for label, parts in (("steps", _steps(state)), ("waits", _waits(state)), ("ranks", _ranks_line(state))):
        cells = list(parts)
        rows.append((label, Cell(" | ".join(one.text for one in cells if not one.style))))
        rows += (("", one) for one in cells if one.style)
    return Facts([*rows, ("pacing", state.pacing)])


def _steps(state: JobState) -> Iterator[Cell]:
    planned = "" if state.planned_steps is None else f" of {state.planned_steps}"
    spread = state.most_steps - state.num_steps
    yield Cell(f"{state.num_steps}{planned}" + (f" (some ranks {spread} ahead)" if spread > 1 else ""))
    if state.step_ns is not None and state.rate is not None:
        yield Cell(f"{format_duration(state.step_ns)} a step, {state.rate:.3g}/s")
    if state.change is not None and state.past_ns is not None:
        change = f"{100 * state.change:+.1f} % against its past {format_duration(state.past_ns)}"
        yield Cell(change, style="warn" if state.change >= _SLOW_CHANGE else "")
    if state.sample_rate:
        yield Cell(f"{format_count(state.sample_rate)} {state.samples_unit}/s")
    if state.eta_s is not None:
        yield Cell(f"done in {_duration(state.eta_s)}")
    held_s = _HELD_STEPS * (state.step_ns or math.inf) / NS_PER_S
    if state.step_age_s is not None and state.step_age_s > held_s:
        yield Cell(f"the present step has lasted {_duration(state.step_age_s)}", style="warn")
    if state.last_step_unix_s is not None and state.num_live == 0:
        yield Cell(f"last step ended {_date(state.last_step_unix_s)}")


def _waits(state: JobState) -> Iterator[Cell]:
    if state.wait_share is None or state.blocked_share is None:
        yield Cell("no step was looked at in detail yet")
    else:
        age = f" (of the last {_duration(state.detail_s)})" if state.detail_s is not None and state.detail_s > 5 else ""
        yield Cell(f"exposed wait {percent(state.wait_share)} of a step{age}")
        yield Cell(f"blocked in communication {percent(state.blocked_share)}")
    if state.halfwidth_ns:
        yield Cell(f"clock error at most {format_duration(state.halfwidth_ns)}")


def _ranks_line(state: JobState) -> Iterator[Cell]:
    ended = f", {state.num_ended} ended" if state.num_ended else ""
    yield Cell(f"{state.num_live} of {state.world_size} live{ended}")
    if state.silent:
        yield Cell(f"silent: {_short(state.silent)}", style="bad")
    if state.missing:
        yield Cell(f"no file: {_short(state.missing)}", style="warn")
    yield Cell(f"{format_count(state.num_dropped)} rows dropped", style="warn" if state.num_dropped else "")
    if state.looked_s > _STALE_S:
        yield Cell(f"each looked at within {_duration(state.looked_s)}")


def _short(ranks: tuple[int, ...]) -> str:
    names = rank_list(ranks)
    return names if len(names) <= _MAX_RANGES else plural(len(ranks), "rank")


def _hang(hang: HangState | None) -> Iterator[Block]:
    if hang is None:
        return
    found = f"(found {_duration(hang.found_s)} ago)" if hang.found_s > 2 else ""
    lines = [("hang", Cell(hang.headline, style="bad")), *(("", Cell(why)) for why in hang.why)]
    yield Facts([*lines, ("", Cell(hang.advice, style="strong")), ("", Cell(found, style="quiet"))])


def _ranks(
    ranks: list[RankState], choice: Choice, *, is_wide: bool, room: int, has_keys: bool, step_ns: float | None
) -> Section:
    held_s = max(_HELD_S, _HELD_STEPS * (step_ns or 0.0) / NS_PER_S)
    cursor = min(choice.cursor, len(ranks) - 1)
    first = max(0, min(cursor - room // 2, len(ranks) - room))
    rows = []
    for place, one in list(enumerate(ranks))[first : first + room]:
        age = "-" if one.detail_age_s is None else _duration(one.detail_age_s)
        cells = [str(one.rank), *([one.host] if is_wide else []), str(one.step) if one.step >= 0 else "-"]
        cells += [_time(one.own_ns), _signed(one.excess), _time(one.wait_ns)]
        cells += [_time(one.blocked_ns), age] if is_wide else []
        is_marked = has_keys and place == cursor
        what = Cell(_what(one, held_s), style="" if is_marked else _what_style(one))
        rows.append(Row([*cells, what], style="marked" if is_marked else ""))
    head = ["rank", *(["host"] if is_wide else []), "step", "own", "excess", "wait"]
    head += ["blocked", "age", "what"] if is_wide else ["what"]
    text = (1, len(head) - 1) if is_wide else (len(head) - 1,)
    more = Notes([f"{len(ranks) - room} more" if len(ranks) > room else ""])
    return Section("Ranks", [Table(head, rows, text=text, is_cut=True), more])


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
        return "bad"
    return "warn" if one.reason.startswith("own work") else ""


def _hosts(state: JobState, most: int) -> Section:
    hosts = sorted(state.hosts, key=lambda one: (-(one.share or 0), -max(one.sent_bps, one.received_bps)))
    rows = []
    for one in hosts:
        share = "unknown" if one.share is None else percent(one.share)
        names = (one.host[:_MAX_NAME], one.interface[:_MAX_NAME])
        rows.append((*names, format_rate(one.sent_bps), format_rate(one.received_bps), share))
    head = ("host", "interface", "sent", "received", "of line rate")
    table = Table(head, rows, text=(0, 1), limits=(most, 0), which="busiest", is_cut=True)
    return Section("Hosts", [table])


def _rank_page(one: RankState) -> Section:
    age = "" if one.step_age_s is None else f", which had lasted {_duration(one.step_age_s)} at the last flush"
    step = ""
    if one.own_ns is not None and one.detail_age_s is not None:
        step = (
            f"seen {_duration(one.detail_age_s)} ago: own work {_time(one.own_ns)}"
            f" ({_signed(one.excess)} against its role), blocked {_time(one.blocked_ns)},"
            f" of that waiting for others {_time(one.wait_ns)}"
        )
    dropped = f"{format_count(one.num_dropped)} rows dropped" if one.num_dropped else ""
    facts = [
        ("", Cell(one.problem, style="bad")),
        ("now", Cell(f"in step {one.step}{age}" if one.step >= 0 else f"before its first step{age}")),
        ("", Cell(f"silent for {_duration(one.silent_s)}" if one.silent_s else "", style="bad")),
        ("a step", Cell(step)),
        *((name, Cell(_time(time_ns))) for name, time_ns in sorted(one.phases_ns.items(), key=lambda item: -item[1])),
        *(("", Cell(f"open: {call}")) for call in one.open_calls),
        ("", Cell(dropped, style="warn")),
        ("", Cell(one.reason, style="strong")),
    ]
    return Section(f"rank {one.rank} on {one.host or 'an unknown host'}: {one.doing}", [Facts(facts)])


def _keys_line(choice: Choice) -> str:
    back = "enter: all ranks" if choice.opened else "enter: open the rank"
    return f"q: quit  s: sort ({choice.sort})  up/down: mark  {back}  ?: keys"


def _help() -> Section:
    keys = (
        ("q", "quit"),
        ("s", "sort by the next of: " + ", ".join(Sort)),
        ("up, down, k, j", "mark another rank"),
        ("page up, page down", "mark one ten places away"),
        ("enter", "open the marked rank, or go back"),
        ("?", "show or leave this page"),
    )
    columns = (
        ("own", "time of a step in which the rank was not blocked in communication"),
        ("excess", "own against its role"),
        ("wait", "time blocked beyond that of the least blocked rank of its role"),
        ("age", "time since the rank was looked at"),
    )
    return Section("Keys", [Table(("", ""), keys, text=(0, 1)), Facts(columns)])


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
