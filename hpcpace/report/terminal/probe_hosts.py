"""The noise of cores and the copies of a probe as text."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.core.text import format_bytes, format_duration, percent, plural, printable
from hpcpace.probe.record import CopiesRecord, CoreNoise, NoiseRecord
from hpcpace.report.words.probe_hosts import (
    DEVICE_TITLE,
    MEMORY_TITLE,
    link_share,
    memory_kind,
    noise_heading,
    period_words,
    usual_loss_words,
)

_MOST_CORES = 8
_MOST_ROWS = 16
# Below this part of the time, what a core loses is not worth a line.
_LEAST_SHARE = 0.005


def noise_lines(noise: NoiseRecord) -> list[str]:
    """Return the noise in lines: what cores usually lose, and the worst ones with what recurs on them."""
    if not noise.cores:
        return [noise_heading(noise), *(f"  {printable(note)}" for note in noise.notes)]
    lines = [f"{noise_heading(noise)}:", f"  {usual_loss_words(noise)}"]
    worst = sorted(noise.cores, key=lambda core: -core.figures.share)
    noisy = [core for core in worst if core.figures.share >= _LEAST_SHARE]
    lines += [f"  {_core_words(core)}" for core in noisy[:_MOST_CORES]]
    lines += [f"  and {len(noisy) - _MOST_CORES} more cores"] if len(noisy) > _MOST_CORES else []
    return lines + [f"  {printable(note)}" for note in noise.notes]


def _core_words(core: CoreNoise) -> str:
    figures = core.figures
    return (
        f"{printable(core.host)} core {core.cpu}: {percent(figures.share)} lost, longest "
        f"{format_duration(figures.longest_ns)}, {period_words(figures)}"
    )


def copies_lines(copies: CopiesRecord) -> list[str]:
    """Return the copies in lines."""
    lines = [f"{MEMORY_TITLE}:"] if copies.memory else []
    lines += [
        f"  {printable(row.host)} NUMA node {row.numa_node}, {plural(row.num_threads, 'core')}: "
        f"{format_bytes(row.rate)}/s"
        for row in copies.memory[:_MOST_ROWS]
    ]
    if len(copies.memory) > _MOST_ROWS:
        lines.append(f"  and {len(copies.memory) - _MOST_ROWS} more")
    lines += _devices(copies)
    return lines + [f"  {printable(note)}" for note in copies.notes]


def _devices(copies: CopiesRecord) -> Iterator[str]:
    if copies.devices:
        yield f"{DEVICE_TITLE}:"
    for row in copies.devices[:_MOST_ROWS]:
        limit = f", {link_share(row)} of its link" if row.limit is not None else ""
        yield (
            f"  {printable(row.host)} GPU {row.device}, NUMA node {row.numa_node}, "
            f"{memory_kind(row)}: to it {format_bytes(row.to_device)}/s, from it "
            f"{format_bytes(row.from_device)}/s{limit}"
        )
    if len(copies.devices) > _MOST_ROWS:
        yield f"  and {len(copies.devices) - _MOST_ROWS} more"
