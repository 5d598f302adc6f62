"""Quantities, ranks and places in words, the same wherever hpcpace names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcpace.quoting import printable
from hpcpace.units import NS_PER_MS

_MOST_HOSTS = 4
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


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7` for ascending ranks; of many ranges only the first, and how many ranks more."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs[:_MAX_RANGES]]
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
    if len(by_host) > _MOST_HOSTS:
        return f"{rank_list(ranks)} on {len(by_host)} hosts"
    names = [rank_list(some) + (f" on {printable(host)}" if host else "") for host, some in by_host.items()]
    return ", ".join(names)


def listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])
