"""The noise of cores and the copies of a probe on its page, by host and one by one, in tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.text import format_duration, percent
from hpcpace.probe.record import CopiesRecord, CoreNoise, NoiseRecord
from hpcpace.report.html.text import notes, table
from hpcpace.report.words.probe import rate_words
from hpcpace.report.words.probe_hosts import (
    DEVICE_TITLE,
    MEMORY_TITLE,
    link_share,
    memory_kind,
    noise_heading,
    usual_loss_words,
)

_MOST_ROWS, _MOST_OPEN = 256, 16

HOST_HEAD = ("host", "cores", "usually lost", "most lost", "by core", "longest", "cores with a period")
CORE_HEAD = ("host", "core", "lost", "longest", "detours", "recurs every", "lost to that")


def noise_content(noise: NoiseRecord | None) -> tuple[str, ...]:
    """Return the section; empty where noise was not part of the probe."""
    if noise is None:
        return ()
    sentences = [noise_heading(noise), *filter(None, [usual_loss_words(noise)]), *noise.notes]
    return notes(sentences, has_terms=False), _hosts_table(noise.cores), _cores_table(noise.cores)


def copies_content(copies: CopiesRecord | None) -> tuple[str, ...]:
    """Return the section; empty where copies were not part of the probe."""
    if copies is None:
        return ()
    memory = [
        (row.host, str(row.numa_node), str(row.num_threads), rate_words(row.rate))
        for row in sorted(copies.memory, key=lambda row: row.rate / max(row.num_threads, 1))
    ]
    devices = [
        (
            row.host,
            str(row.device),
            str(row.numa_node),
            memory_kind(row),
            rate_words(row.to_device),
            rate_words(row.from_device),
            link_share(row),
        )
        for row in copies.devices
    ]
    return (
        notes(copies.notes, has_terms=False),
        _folded(_title(MEMORY_TITLE) + ", the slowest first", ("host", "NUMA node", "cores", "rate"), memory, (0,)),
        _folded(
            _title(DEVICE_TITLE),
            ("host", "GPU", "NUMA node", "memory", "to the GPU", "from the GPU", "of its link"),
            devices,
            (0, 3),
        ),
    )


def _hosts_table(cores: Sequence[CoreNoise]) -> str:
    """Return one row for each host, the noisiest first."""
    by_host: dict[str, list[CoreNoise]] = {}
    for core in cores:
        by_host.setdefault(core.host, []).append(core)
    worst = {name: max(own, key=lambda core: core.figures.share) for name, own in by_host.items()}
    rows = [
        (
            name,
            str(len(by_host[name])),
            percent(float(np.median([core.figures.share for core in by_host[name]]))),
            percent(worst[name].figures.share),
            str(worst[name].cpu),
            format_duration(max(core.figures.longest_ns for core in by_host[name])),
            str(sum(core.figures.period_ns is not None for core in by_host[name])),
        )
        for name in sorted(by_host, key=lambda name: -worst[name].figures.share)
    ]
    return _folded("Time that detours cost on the cores of each host, the noisiest first", HOST_HEAD, rows, (0,))


def _cores_table(cores: Sequence[CoreNoise]) -> str:
    rows = [
        (
            core.host,
            str(core.cpu),
            percent(core.figures.share),
            format_duration(core.figures.longest_ns),
            str(core.figures.num_detours),
            "no period" if core.figures.period_ns is None else format_duration(core.figures.period_ns),
            "" if core.figures.period_share is None else percent(core.figures.period_share),
        )
        for core in sorted(cores, key=lambda core: -core.figures.share)
    ]
    return _folded("Cores, the noisiest first", CORE_HEAD, rows, (0,))


def _folded(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int]) -> str:
    """Return a table whose first column is a host, folded where it is long, and cut where it is very long."""
    which = f" ({_MOST_ROWS} of {len(rows)})" if len(rows) > _MOST_ROWS else ""
    shown = rows[:_MOST_ROWS]
    inside = table(f"{caption}{which}", head, shown, text=text, about=[("", row[0]) for row in shown])
    if len(rows) <= _MOST_OPEN:
        return inside
    return f"<details><summary>{caption}: {len(shown)} of {len(rows)} rows</summary>{inside}</details>"


def _title(words: str) -> str:
    return words[:1].upper() + words[1:]
