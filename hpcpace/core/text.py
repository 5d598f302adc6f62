"""Quantities, names and problems as text for people: units, quotes, lists, ranges, folding of many lines.

Time is int64 nanoseconds everywhere else. Others chose the names of devices and hosts, paths, and contents of files,
so these are made printable before they reach a terminal or a shell. A run of 1,000 ranks with one fault has 1,000
problems, most often the same one: sentences that differ only in rank, table, file or figures become one line.
"""

from __future__ import annotations

import re
import reprlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hpcpace.core.records import dataclass

_Item = TypeVar("_Item")
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000


def nanoseconds(time_s: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(time_s * NS_PER_S)


def format_duration(time_ns: float) -> str:
    """Return a duration with three significant digits: `850 ns`, `12.3 us`, `4.56 ms`, `7.89 s`."""
    magnitude = abs(time_ns)
    for scale, unit in ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us")):
        if magnitude >= scale * 0.9995:
            return f"{_three_digits(time_ns / scale)} {unit}"
    return f"{time_ns:.0f} ns"


def format_bytes(size_bytes: float) -> str:
    """Return a size with three significant digits in powers of 1000: `512 B`, `1.23 MB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1000
    raise AssertionError("unreachable: TB always returns")


def format_count(count: float) -> str:
    """Return a count with three significant digits: `950`, `12.3k`, `4.56M`."""
    value = float(count)
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            return f"{_three_digits(value)}{unit}" if unit or value % 1 else f"{value:.0f}"
        value /= 1000
    raise AssertionError("unreachable: G always returns")


def parse_rate(text: str) -> int:
    """Return a rate in bits per second from what `tc` takes, too: `500mbit`, `1gbit`, `10Gbit`.

    Raises:
        ValueError: the text is no positive rate.
    """
    return _parse(text, {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}, "a rate like 500mbit or 1gbit")


def parse_size(text: str) -> int:
    """Return a size in bytes from text: `512`, `64kB`, `256MiB`, `1GB`.

    Raises:
        ValueError: the text is no positive size.
    """
    decimal = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    binary = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    return _parse(text, decimal | binary, "a size like 64kB or 256MiB")


def format_rate(rate_bps: float) -> str:
    """Return a rate with three significant digits: `500 Mb/s`, `1.00 Gb/s`."""
    return f"{format_bytes(rate_bps)[:-1]}b/s"


def _parse(text: str, units: dict[str, int], what: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    value = float(found[1]) * units[found[2]] if found and found[2] in units else 0.0
    if value <= 0.5:
        raise ValueError(f"{text!r} is not {what}")
    if value > 1e15:
        largest = next(unit for unit, factor in reversed(units.items()) if factor == 10**9)
        raise ValueError(f"{text!r} is too large: give at most 1000000{largest}")
    return round(value)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    decimals = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{value:.{decimals}f}"


_MAX_LETTERS = 60
# Beyond these, reprlib writes "..." for what is inside.
_MAX_LEVELS, _MAX_ENTRIES = 3, 4
# Python refuses to write integers of more than 4,300 digits, and takes quadratic time for shorter ones.
_MAX_BITS = 256
_GAP = "..."
_MIN_WORD = 60
# Times the letters that are left, so that a text of megabytes is not searched for its longest word.
_MAX_PRECUT = 64


def printable(text: str) -> str:
    """Return a text with what would steer a terminal, or cannot be written, as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


class _Short(reprlib.Repr):
    """`repr` in bounded time, whatever a value contains; by what it is an instance of, where reprlib goes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = _MAX_LEVELS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MAX_ENTRIES

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, bool):
            return repr(x)
        if isinstance(x, int):
            return repr(int(x)) if x.bit_length() <= _MAX_BITS else f"<an integer of {x.bit_length()} bits>"
        if isinstance(x, str):
            return repr(x[: _MAX_LETTERS + 1])
        if isinstance(x, (bytes, bytearray)):
            return repr(bytes(x[: _MAX_LETTERS + 1]))
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(x, kind):
                if level <= 0 and x:
                    return "{...}" if kind is dict else "[...]"
                written: str = getattr(self, f"repr_{kind.__name__}")(x, level)
                return written
        return repr(x) if x is None or isinstance(x, float) else f"<{type(x).__name__}>"


def shown(value: Any) -> str:
    """Return a value that a file contains as a message names it: at most 60 letters, printable, on one line.

    The time it takes is bounded, also for containers that contain each other and for integers of a million digits.
    """
    text = printable(re.sub(r"\s+", " ", _Short().repr(value)))
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."


def shortened(text: str, *, max_letters: int = 80) -> str:
    """Return a text that others chose, printable, and cut to a length: long words lose their middle first.

    The middle says least of a path, and names differ at their ends.
    """
    text = printable(_without_middle(text, _MAX_PRECUT * max_letters))
    while len(text) > max_letters:
        start, stop = max((found.span() for found in re.finditer(r"\S+", text)), key=lambda span: span[1] - span[0])
        left = max(stop - start - (len(text) - max_letters), min(_MIN_WORD, max_letters))
        if stop - start <= left:
            return _without_middle(text, max_letters)
        text = text[:start] + _without_middle(text[start:stop], left) + text[stop:]
    return text


def _without_middle(text: str, most: int) -> str:
    end = (most - len(_GAP)) // 2
    return text if len(text) <= most else f"{text[: most - len(_GAP) - end]}{_GAP}{text[-end:]}"


def one_line(text: str) -> str:
    """Return an error that lists its reasons line by line, as `- reason`, as one line."""
    return "; ".join(line.removeprefix("- ") for line in text.splitlines())


def shell_word(text: str) -> str:
    """Return a text as one word of a shell line to paste; plain names stay as they are."""
    return shlex.quote(printable(text))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii", "backslashreplace")


_MAX_HOSTS = 4
# Every second one of a thousand ranks takes a screen, and nobody reads it.
_MAX_RANGES = 16


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


def first_few(
    items: Sequence[_Item], num: int, *, words: Callable[[_Item], str] = str, before: str = "", noun: str = ""
) -> list[str]:
    """Return the first items in words and, if there are others, how many more: `a`, `b`, `3 more`.

    Args:
        items: all of them.
        num: how many are named.
        words: puts one into words.
        before: in front of how many more there are, such as "and ".
        noun: what the others are.
    """
    left = len(items) - num
    rest = plural(left, f"more {noun}") if noun else f"{left} more"
    return [*map(words, items[:num]), *([f"{before}{rest}"] if left > 0 else [])]


def few(items: Sequence[_Item], num: int, words: Callable[[_Item], str] = str) -> str:
    """Return all items as `a, b`, or the first ones as `a, b and 3 more`."""
    names = first_few(items, num, words=words)
    return listed(names) if len(items) > num else ", ".join(names)


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7` for ascending ranks; of many ranges only the first, and how many ranks more."""
    runs = runs_of(ranks)
    names = range_names(runs[:_MAX_RANGES])
    if runs[_MAX_RANGES:]:
        names.append(f"... and {sum(last - first + 1 for first, last in runs[_MAX_RANGES:])} more")
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(names)}"


def named_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return ranks with their hosts, like `ranks 0-3 on n1, rank 7 on n2`; where all hosts are one, without it."""
    if len(set(hosts.values()) - {""}) < 2:
        return rank_list(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    if len(by_host) > _MAX_HOSTS:
        return f"{rank_list(ranks)} on {len(by_host)} hosts"
    names = [rank_list(some) + (f" on {printable(host)}" if host else "") for host, some in by_host.items()]
    return ", ".join(names)


def listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


MAX_LETTERS = 300
"""The letters of one line: three lines of a terminal of 120 columns."""
MAX_MESSAGE_LETTERS = 480
"""The letters of a line of an error: it may name several paths, which are for pasting."""
MAX_KINDS = 4
"""The kinds of problems that are shown, where there are more: with the rest of a message they fit on a small screen."""
_MAX_WHOLE = 3
_MAX_NAME = 40
_MAX_MESSAGE_LINES = 24
# What sentences of one kind differ in: the place that they begin with, unless that is the file of a rank; ranks,
# tables and columns; and figures, or what a file says, in quotes.
_VARYING = re.compile(
    r"(?P<place>\A(?!\S*rank-\d+\.)(?=\S*[a-zA-Z])\S*[./\d]\S*?(?=:?(?:\s|\Z)))"
    r"|(?<=\brank[- ])(?P<rank>\d+)"
    r"|(?<=\btable )(?P<table>\w+)|(?<=\bcolumn )(?P<column>\w+)"
    r"|(?P<figure>\d+|'[^']*')"
)


def folded(problems: Iterable[str], *, rest: str = "", is_ranked: bool = False, is_verbose: bool = False) -> list[str]:
    """Return problems in lines for a screen, those of one kind in one line, each of at most 300 letters.

    Args:
        problems: a sentence each, also one that lists its reasons line by line.
        rest: what shows those that have no line, like `--verbose`.
        is_ranked: whether the first ones matter most: then these are shown, and not one of each kind.
        is_verbose: whether each problem gets a line that is not cut.
    """
    said = [printable(_as_one_line(one, is_verbose=is_verbose)) for one in problems]
    if is_verbose:
        return said
    if len(said) <= _MAX_WHOLE:
        return [shortened(one, max_letters=MAX_LETTERS) for one in said]
    sentences = [_sentence(one) for one in said]
    by_kind: dict[str, list[_Sentence]] = {}
    for one in sentences:
        by_kind.setdefault(one.kind, []).append(one)
    kinds = [_Kind(alike) for alike in by_kind.values()]
    if is_ranked or (len(kinds) == 1 and "figure" in kinds[0].varied):
        lines, left = [one.text for one in sentences[:_MAX_WHOLE]], sentences[_MAX_WHOLE:]
    else:
        shown = kinds if len(kinds) <= MAX_KINDS else kinds[:_MAX_WHOLE]
        lines, left = [kind.line() for kind in shown], [one for kind in kinds[len(shown) :] for one in kind.sentences]
        if not left and all(kind.varied.keys() <= {"rank"} for kind in shown):
            return lines
    ranks = [rank for one in left if (rank := one.rank) is not None]
    of = f" ({_ranks(ranks)})" if ranks else ""
    end = [*([f"and {len(left)} more{of}"] if left else []), *([f"all {len(said)}: {rest}"] if rest else [])]
    return [*lines, "; ".join(end)] if end else lines


def folded_message(text: str, *, rest: str = "", is_verbose: bool = False) -> str:
    """Return an error in lines for a screen: what it lists line by line, as `- reason`, is folded; arguments as there.

    Args:
        text: of the error.
    """
    lines = [printable(line) for line in text.split("\n")]
    if is_verbose:
        return "\n".join(lines)
    told = [shortened(line, max_letters=MAX_MESSAGE_LETTERS) for line in lines if not line.startswith("- ")]
    reasons = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    if len(told) > _MAX_MESSAGE_LINES:
        told[_MAX_MESSAGE_LINES:] = [f"and {len(told) - _MAX_MESSAGE_LINES} more lines"]
    return "\n- ".join(["\n".join(told), *folded(reasons, rest=rest)])


def _as_one_line(problem: str, *, is_verbose: bool) -> str:
    if "\n" not in problem:
        return problem
    return one_line(problem if is_verbose else folded_message(problem))


@dataclass(frozen=True)
class _Sentence:
    """A problem; its text without what sentences of its kind differ in, and what that is: (name, begin, end) each."""

    text: str
    kind: str
    spans: tuple[tuple[str, int, int], ...]

    @property
    def rank(self) -> str | None:
        """The first rank that it names."""
        return next((self.text[start:stop] for name, start, stop in self.spans if name == "rank"), None)

    def value(self, number: int) -> str:
        """Return what differs at a place."""
        _, start, stop = self.spans[number]
        return self.text[start:stop]


def _sentence(problem: str) -> _Sentence:
    text = shortened(problem, max_letters=MAX_LETTERS)
    spans = tuple((found.lastgroup or "", *found.span()) for found in _VARYING.finditer(text))
    return _Sentence(text, _VARYING.sub("\0", text), spans)


class _Kind:
    """Sentences that differ in ranks, places, tables and figures alone, at least one.

    Attributes:
        sentences: all of them.
        varied: what they differ in, by its name; a rank that they name twice counts once.
    """

    def __init__(self, sentences: Sequence[_Sentence]) -> None:
        self.sentences = sentences
        self.varied: dict[str, list[str]] = {}
        self._values = [
            list(dict.fromkeys(one.value(number) for one in sentences)) for number in range(len(sentences[0].spans))
        ]
        for (name, _, _), values in zip(sentences[0].spans, self._values, strict=True):
            if len(values) > 1:
                self.varied.setdefault(name, values)

    def line(self) -> str:
        """Return one line for all."""
        first, text, end = self.sentences[0], "", 0
        for (name, start, stop), values in zip(first.spans, self._values, strict=True):
            text += first.text[end:start] + _common(name, values)
            end = stop
        text += first.text[end:]
        if len(self.sentences) == 1:
            return text
        figures = ", figures of the first" if "figure" in self.varied else ""
        return shortened(f"{self._how_many()}{figures}: {text}", max_letters=MAX_LETTERS)

    def _how_many(self) -> str:
        """Return how many sentences there are, and what they differ in."""
        ranks = self.varied.get("rank", [])
        if self.varied.keys() <= {"rank", "figure"} and len(ranks) == len(self.sentences):
            return f"{len(ranks)} ranks ({_ranks(ranks).removeprefix('ranks ')})"
        names = self.varied.keys() - ({"column"} if "table" in self.varied else set())
        who = [words(self.varied[name]) for name, words in _WORDS.items() if name in names]
        times = f"{len(self.sentences)} times"
        return f"{times} ({', '.join(who)})" if who else times


def _common(name: str, values: Sequence[str]) -> str:
    """Return what stands in a line for what its problems differ in."""
    if name == "figure" or len(values) == 1:
        return values[0]
    return f"{_folder(values)}*" if name == "place" else "*"


def _folder(names: Sequence[str]) -> str:
    """Return the folder of all paths, with a slash behind it; empty where they are in several."""
    folder = "".join(names[0].rpartition("/")[:2])
    return folder if all(name.startswith(folder) for name in names) else ""


def _ranks(numbers: Sequence[str]) -> str:
    return rank_list(sorted(set(map(int, numbers))))


def _places(names: Sequence[str]) -> str:
    return _examples([name.removeprefix(_folder(names)) for name in names])


def _examples(names: Sequence[str]) -> str:
    return listed(first_few(names, _MAX_WHOLE, words=lambda name: shortened(name, max_letters=_MAX_NAME)))


def _tables(names: Sequence[str]) -> str:
    return f"tables {_examples(names)}"


def _columns(names: Sequence[str]) -> str:
    return f"columns {_examples(names)}"


_WORDS: dict[str, Callable[[Sequence[str]], str]] = {
    "rank": _ranks,
    "place": _places,
    "table": _tables,
    "column": _columns,
}
"""How a line names what its problems differ in."""


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")


def own_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the job's own code, or of all if none is; empty without frames.

    Args:
        frames: the innermost last.
    """
    own = [frame for frame in frames if not is_of_library(frame)]
    return (own or frames or [""])[-1]


def is_of_library(frame: str) -> bool:
    """Return whether a frame is of Python, of an installed package, or of code without a file."""
    return frame.startswith("<") or any(part in frame for part in _LIBRARIES)


def short_frame(frame: str) -> str:
    """Return a frame without the folder of its file."""
    place, found, function = frame.partition(" in ")
    return place.rpartition("/")[2] + found + function


_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of ascending numbers that has no gap."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def range_names(runs: Iterable[tuple[int, int]]) -> list[str]:
    """Return runs as `4-7`, those of a single number as `8`."""
    return [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]


def format_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as `0-3,8`; an empty text for none."""
    return ",".join(range_names(runs_of(numbers)))


def parse_range(text: str) -> range:
    """Return the numbers of `8` or `4-7`; how many there may be is for the caller to bound before it lists them.

    Raises:
        ValueError: the text has another form, or the range goes backwards.
    """
    found = _RANGE.fullmatch(text)
    numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not numbers:
        raise ValueError(f"{text[:80]!r} is not a number or a range like 4-7")
    return numbers
