"""Conversions between units, and numbers as people read them. Time is int64 nanoseconds everywhere else."""

from __future__ import annotations

import re

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
