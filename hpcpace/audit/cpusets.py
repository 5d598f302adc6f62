"""Sets of CPUs as integers, bit k for CPU k, and how the kernel (`0-3,8`) and srun (`0xff`) write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from hpcpace.core.text import format_ranges

_MAX_CPUS = 65_536
"""CPU numbers must be below this; the kernel's own limit is 8,192."""

_ITEM = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6})/(\d{1,6}))?)?")


@lru_cache(maxsize=65_536)
def parse_list(text: str) -> int:
    """Return the set that the kernel writes as `0-3,8` (or `0-30:2/4`, two of every four); empty for an empty text.

    Raises:
        ValueError: the text has another form, or a number is too large.
    """
    cpus = 0
    for item in filter(None, text.strip().split(",")):
        found = _ITEM.fullmatch(item.strip())
        if not found:
            raise ValueError(f"{text[:80]!r} is not a list of CPUs like 0-3,8")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if last < first or last >= _MAX_CPUS:
            raise ValueError(f"{text[:80]!r} is not a list of CPUs: {item!r} is not a range below {_MAX_CPUS}")
        if found[3]:
            used, group = int(found[3]), int(found[4])
            if not 0 < used <= group:
                raise ValueError(f"{text[:80]!r} is not a list of CPUs: {item!r} has an invalid group")
            cpus |= of(cpu for cpu in range(first, last + 1) if (cpu - first) % group < used)
        else:
            cpus |= ((1 << (last - first + 1)) - 1) << first
    return cpus


def parse_mask(text: str) -> int:
    """Return the set that the kernel writes as `1,0000ffff`: hexadecimal digits, 32 CPUs in each part, the last first.

    Raises:
        ValueError: the text has another form, or is too long.
    """
    if len(text) > _MAX_CPUS // 2 or not re.fullmatch(r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8})*", text):
        raise ValueError(f"{text[:80]!r} is not a mask of CPUs like 1,0000ffff")
    cpus = 0
    for part in text.split(","):
        cpus = cpus << 32 | int(part, 16)
    return cpus


@lru_cache(maxsize=65_536)
def format_list(cpus: int) -> str:
    """Return a set as the kernel writes it: `0-3,8`; an empty text for the empty set."""
    return format_ranges(members(cpus))


def format_mask(cpus: int) -> str:
    """Return a set as `--cpu-bind=mask_cpu` takes it: `0xff00`."""
    return hex(cpus)


def of(cpus: Iterable[int]) -> int:
    """Return the set of the given CPU numbers."""
    found = 0
    for cpu in cpus:
        found |= 1 << cpu
    return found


def members(cpus: int) -> Iterator[int]:
    """Yield the CPU numbers of a set in ascending order."""
    while cpus:
        lowest = cpus & -cpus
        yield lowest.bit_length() - 1
        cpus ^= lowest


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers of ranks as the kernel writes sets, `0-3,8`; separated by commas if some are negative."""
    chosen = sorted(set(numbers))
    return ",".join(map(str, chosen)) if chosen and chosen[0] < 0 else format_ranges(chosen)
