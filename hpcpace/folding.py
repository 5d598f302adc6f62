"""Many problems in a few lines: what is wrong, how often, with which ranks, tables or files, and where the rest is.

A run of 1,000 ranks with one fault has 1,000 problems, and most often the same one. Sentences that differ only in the
rank, table or file that they name, or in figures, become one line. Files keep all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcpace.quoting import one_line, printable, shortened
from hpcpace.wording import listed, rank_list

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
    more = [f"{len(names) - _MAX_WHOLE} more"] if len(names) > _MAX_WHOLE else []
    return listed([*(shortened(name, max_letters=_MAX_NAME) for name in names[:_MAX_WHOLE]), *more])


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
