"""Names of hosts in short: Slurm's own form where they are Slurm's, escaped where they are anything else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcpace.audit.quoting import printable, shell_word
from hpcpace.errors import TraceError
from hpcpace.metrics.hostlist import compress

_MOST_HOSTS = 65_536
_PART = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?([^\[\],]*)")


def short_list(names: Iterable[str]) -> str:
    """Return names as `n[01-04,07]`; names that no Slurm has are listed as they are, escaped."""
    names = list(names)
    try:
        return compress(names)
    except TraceError:
        return ",".join(sorted(printable(name) for name in names))


def exclude_option(names: Iterable[str]) -> str:
    """Return `--exclude=n[3,7]` for sbatch, safe to paste."""
    names = list(names)
    try:
        return f"--exclude={compress(names)}"
    except TraceError:
        return f"--exclude={shell_word(','.join(names))}"


def expand(text: str) -> list[str]:
    """Return the names of Slurm's `n[01-03,7],gpu5`.

    Raises:
        ValueError: the text is something else, or has very many names.
    """
    names: list[str] = []
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)
    if ",".join(parts) != text:
        raise ValueError(f"{text[:80]!r} is no list of hosts like n[1-4]")
    for part in parts:
        found = _PART.fullmatch(part)
        if not found:
            raise ValueError(f"{text[:80]!r} is no list of hosts like n[1-4]")
        if found[2] is None:
            names.append(part)
            continue
        for item in found[2].split(","):
            first, _, last = item.partition("-")
            if not first.isdigit() or (last and not last.isdigit()):
                raise ValueError(f"{text[:80]!r} is no list of hosts like n[1-4]")
            numbers = range(int(first), int(last or first) + 1)
            if len(numbers) + len(names) > _MOST_HOSTS:
                raise ValueError(f"{text[:80]!r} has more than {_MOST_HOSTS} hosts")
            names += [f"{found[1]}{number:0{len(first)}d}{found[3]}" for number in numbers]
    return names
