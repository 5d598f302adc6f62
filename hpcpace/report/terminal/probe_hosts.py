"""The noise of cores and the copies of a probe as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcpace.probe.copies_record import CopiesRecord
from hpcpace.probe.noise_record import CoreNoise, NoiseRecord
from hpcpace.quoting import printable
from hpcpace.units import format_bytes, format_duration
from hpcpace.wording import percent, plural

_MOST_CORES = 8
_MOST_ROWS = 16
# Below this part of the time, what a core loses is not worth a line.
_LEAST_SHARE = 0.005


def noise_lines(noise: NoiseRecord) -> list[str]:
    """Return the noise in lines: what cores usually lose, and the worst ones with what recurs on them."""
    if not noise.cores:
        return ["noise of cores: not measured", *(f"  {printable(note)}" for note in noise.notes)]
    shares = [core.figures.share for core in noise.cores]
    resolution_ns = float(np.median([core.figures.resolution_ns for core in noise.cores]))
    span_ns = float(np.median([core.figures.span_ns for core in noise.cores]))
    lines = [
        f"noise of {plural(len(noise.cores), 'core')}, {format_duration(span_ns)} each, detours from "
        f"{format_duration(resolution_ns)} on:",
        f"  a core usually loses {percent(float(np.median(shares)))} of the time",
    ]
    worst = sorted(noise.cores, key=lambda core: -core.figures.share)
    noisy = [core for core in worst if core.figures.share >= _LEAST_SHARE]
    lines += [f"  {_core_words(core)}" for core in noisy[:_MOST_CORES]]
    lines += [f"  and {len(noisy) - _MOST_CORES} more cores"] if len(noisy) > _MOST_CORES else []
    return lines + [f"  {printable(note)}" for note in noise.notes]


def _core_words(core: CoreNoise) -> str:
    figures = core.figures
    words = f"{printable(core.host)} core {core.cpu}: {percent(figures.share)} lost, longest "
    words += format_duration(figures.longest_ns)
    if figures.period_ns is None or figures.period_share is None:
        return f"{words}, no period"
    return f"{words}, {percent(figures.period_share)} by what recurs every {format_duration(figures.period_ns)}"


def copies_lines(copies: CopiesRecord) -> list[str]:
    """Return the copies in lines."""
    lines = ["copies within memory, read and written together:"] if copies.memory else []
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
        yield "copies between host and device:"
    for row in copies.devices[:_MOST_ROWS]:
        limit = "" if row.limit is None else f", {percent(max(row.to_device, row.from_device) / row.limit)} of its link"
        yield (
            f"  {printable(row.host)} GPU {row.device}, NUMA node {row.numa_node}, "
            f"{'pinned' if row.is_pinned else 'not pinned'}: to it {format_bytes(row.to_device)}/s, from it "
            f"{format_bytes(row.from_device)}/s{limit}"
        )
    if len(copies.devices) > _MOST_ROWS:
        yield f"  and {len(copies.devices) - _MOST_ROWS} more"
