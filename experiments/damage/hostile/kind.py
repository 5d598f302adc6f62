"""What a kind of hostile input is, which bounds a command has to keep on it, and how one is judged.

A kind makes files of some size by chance and says how `hpcpace` is called on them. The command must end by itself with
an exit code of its own, within processor time that is linear in what it reads, within memory, with little to read, and
without anything that could steer a terminal or comes from elsewhere.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.damage.child import Result

Random = np.random.Generator
LEAST_BYTES = 100_000
"""Of smaller inputs the start is most of what the command takes."""
SECRET = "root-only-5e1f"
"""Stands in files that no output may show: what planted links lead to."""
_EXIT_CODES = frozenset({0, 1, 2, 3, 4})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call on hostile files.

    Attributes:
        arguments: of `hpcpace`, without its name.
        num_bytes: what the command has to read at most.
        says: what stdout and stderr together have to contain, each of them.
        never: what neither may contain, besides `SECRET`.
        codes: exit codes that are right for this input.
    """

    arguments: tuple[str, ...]
    num_bytes: int
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    codes: frozenset[int] = _EXIT_CODES


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A kind of hostile input.

    Attributes:
        name: of the kind, unique.
        format: what is read, a row of the table in docs/results/reliability-input.md.
        make: writes the files into an empty folder, by chance, and returns the call.
        most_cpu_s: processor time of a call on less than `LEAST_BYTES`, with its start.
        most_cpu_s_per_mb: processor time for each megabyte that is read of larger inputs, without the start; below a
            megabyte, what one may take, because some work does not depend on the size.
        most_memory_bytes: resident set of the largest process.
        most_lines: of stdout, but for JSON; stderr has 20 lines at most.
    """

    name: str
    format: str
    make: Callable[[Path, Random], Call]
    most_cpu_s: float = 4.0
    most_cpu_s_per_mb: float = 2.0
    most_memory_bytes: int = 1 << 30
    most_lines: int = 60

    def input(self, folder: Path, number: int) -> Call:
        """Write the input of a number, always the same, into an empty folder."""
        return self.make(folder, np.random.default_rng([zlib.crc32(self.name.encode()), number]))


def cpu_s_per_mb(call: Call, result: Result, start_s: float) -> float:
    """Return processor seconds for each megabyte, of a smaller input in all, without the start; 0 for tiny ones."""
    if call.num_bytes < LEAST_BYTES:
        return 0.0
    return max(result.cpu_s - start_s, 0.0) / max(call.num_bytes / 1e6, 1.0)


def problems_of(kind: Hostile, call: Call, result: Result, start_s: float = 0.0) -> list[str]:
    """Return what does not hold of how a call ended.

    Args:
        kind: of the input.
        call: on it.
        result: how it ended.
        start_s: processor time of the same call on empty files.
    """
    stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    both = stdout + stderr
    most_s = kind.most_cpu_s_per_mb * max(call.num_bytes / 1e6, 1.0) + start_s
    if call.num_bytes < LEAST_BYTES:
        most_s = kind.most_cpu_s
    checks = {
        f"signal {result.signal}": result.signal,
        f"killed after {result.wall_s:.0f} s": result.code < 0 and not result.signal,
        f"exit code {result.code}": result.code >= 0 and result.code not in call.codes,
        f"{result.cpu_s:.2f} s of processor time for {call.num_bytes} bytes, {start_s:.2f} s without": result.cpu_s
        > most_s,
        f"{result.memory_bytes >> 20} MiB": result.memory_bytes > kind.most_memory_bytes,
        "a traceback": "Traceback (most recent call last)" in both,
        "control characters": _CONTROL.search(both),
        "what only root may read": SECRET in both,
        "no reason": result.code not in (0, 1, 3) and not stderr.strip(),
        f"{len(stderr.splitlines())} lines on stderr": _lines(stderr) > 20,
        f"{len(stdout.splitlines())} lines on stdout": _lines(stdout) > kind.most_lines
        and "--json" not in call.arguments,
        **{f"does not say {text!r}": _joined(text) not in _joined(both) for text in call.says},
        **{f"says {text!r}": text in both for text in call.never},
    }
    shown = " ".join(both.split())[:300]
    return [f"{problem} ({shown})" for problem, is_wrong in checks.items() if is_wrong]


def _lines(text: str, columns: int = 120) -> int:
    """Return how many lines of a terminal a text takes."""
    return sum(max(-(-len(line) // columns), 1) for line in text.splitlines())


def _joined(text: str) -> str:
    return re.sub(r"\s+", "", text)
