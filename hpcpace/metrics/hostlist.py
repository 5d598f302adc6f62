"""Names of nodes in Slurm's short form, for the line that keeps faulty nodes out of the next job."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcpace.errors import TraceError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


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
                f"{host!r} is no name of a node: letters, digits, '.', '_' and '-' only; exclude it by hand"
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
