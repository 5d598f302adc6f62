"""Names of nodes in Slurm's short form, and the options that keep faulty nodes out of the next job."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.text import parse_range, printable, shell_word, shown

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_PIECE = re.compile(r"([^,\[\]]+)|\[([^,\[\]][^\[\]]*)\]|(,)")
MAX_HOSTS = 65_536
"""In one list, of Slurm's largest clusters; `n[1-999999999]` would fill the memory."""
_MAX_FILE_BYTES = 16 << 20  # memory: of a file with the host of each rank
_MAX_LETTERS = 255
# Slurm's names have five brackets at most, with a text before each and behind the last.
_MAX_PIECES = 11


def read_placement(path: Path) -> list[str]:
    """Return the host of each rank from a file with one on each line, as `hpcpace place` writes it for srun.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no text.
    """
    return read_file(path, most_bytes=_MAX_FILE_BYTES).decode().split()


def exclude_line(hosts: Iterable[str]) -> str:
    """Return `#SBATCH --exclude=n[3,7-9]` for the nodes, in any order; empty for none.

    Raises:
        TraceError: a name has characters that no node of Slurm has.
    """
    names = compress(hosts)
    return f"#SBATCH --exclude={names}" if names else ""


def compress(hosts: Iterable[str]) -> str:
    """Return Slurm's hostlist expression (`scontrol show hostlist`) of nodes, each once: `n[3,7-9]`, `n[008-010],gpu5`.

    The width of the first number of a range holds for all of it, as Slurm expands it.

    Raises:
        TraceError: a name has characters that no node of Slurm has.
    """
    by_prefix: dict[str, list[str]] = {}
    for host in sorted(set(hosts)):
        if not _NAME.fullmatch(host):
            raise TraceError(
                f"{shown(host)} is no name of a node: letters, digits, '.', '_' and '-' only; exclude it by hand"
            )
        numbered = _NUMBERED.fullmatch(host)
        prefix, number = (numbered[1], numbered[2]) if numbered and numbered[1] else (host, "")
        by_prefix.setdefault(prefix, []).append(number)
    return ",".join(part for prefix, numbers in by_prefix.items() for part in _of_prefix(prefix, numbers))


def _of_prefix(prefix: str, numbers: list[str]) -> list[str]:
    ranges: list[list[str]] = []
    for number in sorted(filter(None, numbers), key=lambda digits: (int(digits), len(digits))):
        if ranges and number == str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    plain = [prefix] if "" in numbers else []
    if len(ranges) == 1 and len(ranges[0]) == 1:
        return [*plain, prefix + ranges[0][0]]
    return [*plain, f"{prefix}[{','.join('-'.join(pair) for pair in ranges)}]"] if ranges else plain


def short_list(names: Iterable[str]) -> str:
    """Return names as `n[01-04,07]`; names that no Slurm has are listed as they are, escaped."""
    names = list(names)
    try:
        return compress(names)
    except TraceError:
        return ",".join(sorted(printable(name) for name in names))


def exclusion(faulty: Set[str], nodes: Collection[str]) -> str:
    """Return `#SBATCH --exclude=n[3,7-9]`; empty if it would exclude nothing or everything.

    Args:
        faulty: names of the nodes to leave out.
        nodes: names of all nodes of the job; where all are faulty, or one is not of the job, no line is right.
    """
    try:
        return exclude_line(faulty) if faulty < set(nodes) else ""
    except TraceError:  # a name that no node of Slurm has
        return ""


def node_name(host: str) -> str:
    """Return the name by which Slurm knows a host that calls itself by its domain, too."""
    return host.partition(".")[0]


def node_names(hosts: Iterable[str]) -> dict[str, str]:
    """Return the name of each host without its domain, or the host where several have it, and an address."""
    by_name: dict[str, set[str]] = {}
    for host in hosts:
        by_name.setdefault(node_name(host), set()).add(host)
    found: dict[str, str] = {}
    for name, same in by_name.items():
        is_of_one = len(same - {name}) <= 1 and not name.isdigit()
        found |= {host: name if is_of_one else host for host in same}
    return found


def exclude_option(names: Iterable[str]) -> str:
    """Return `--exclude=n[3,7]` for sbatch, safe to paste."""
    names = list(names)
    try:
        return f"--exclude={compress(names)}"
    except TraceError:
        return f"--exclude={shell_word(','.join(names))}"


def expand(text: str) -> list[str]:
    """Return the names of Slurm's `n[01-03,7],gpu5`, or `rack[1-2]n[1-4]`.

    Raises:
        ValueError: the text is something else, has more than `MAX_HOSTS` names, or one that is very long.
    """
    names: list[str] = []
    found: list[str] = []
    place = num_pieces = 0
    while place < len(text):
        piece = _PIECE.match(text, place)
        if piece is None or (piece[3] and not found):
            raise _no_list(text)
        if piece[3]:
            names += found
            found, num_pieces = [], 0
        else:
            num_pieces += 1
            if num_pieces > _MAX_PIECES:
                raise _no_list(text)
            ends = _numbers(piece[2], text) if piece[2] else [piece[1]]
            if len(found or "1") * len(ends) + len(names) > MAX_HOSTS:
                raise _too_many(text)
            if len(max(found, key=len, default="")) + len(ends[-1]) > _MAX_LETTERS:
                raise ValueError(f"{shown(text)} has a name of more than {_MAX_LETTERS} letters")
            found = [begin + end for begin in found or [""] for end in ends]
        place = piece.end()
    if text and not found:
        raise _no_list(text)
    return names + found


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of `01-03,7`, as wide as their first one."""
    numbers: list[str] = []
    for item in ranges.split(","):
        try:
            span = parse_range(item)
        except ValueError:
            raise _no_list(text) from None
        if len(span) + len(numbers) > MAX_HOSTS:
            raise _too_many(text)
        numbers += [f"{number:0{len(item.partition('-')[0])}d}" for number in span]
    return numbers


def _no_list(text: str) -> ValueError:
    return ValueError(f"{shown(text)} is no list of hosts like n[1-4]")


def _too_many(text: str) -> ValueError:
    return ValueError(f"{shown(text)} has more than {MAX_HOSTS} hosts")


class HostLists:
    """Expands several lists, such as all of a file, up to a number of names together.

    A line of twenty letters can list 65,536 hosts, so that the size of a file says little about what is in it.

    Args:
        max_names: each counts as often as it is listed.
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = self._num_left = max_names

    def expand(self, text: str) -> tuple[str, ...]:
        """Return the names of one list.

        Raises:
            ValueError: it is no list, or all lists have too many names together.
        """
        found = expand(text)
        self._num_left -= len(found)
        if self._num_left < 0:
            raise ValueError(f"up to {shown(text)}, more than {self._max_names} names are listed")
        return tuple(found)
