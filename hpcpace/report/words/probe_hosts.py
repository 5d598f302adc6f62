"""The noise of cores and the copies of a probe in words, for the terminal and the page alike."""

from __future__ import annotations

import numpy as np

from hpcpace.core.text import format_duration, percent, plural
from hpcpace.probe.record import CoreFigures, DeviceRate, NoiseRecord

MEMORY_TITLE = "copies within memory, read and written together"
DEVICE_TITLE = "copies between host and device"


def noise_heading(noise: NoiseRecord) -> str:
    """Return how many cores were measured, for how long, and what shows; that none was otherwise."""
    if not noise.cores:
        return "noise of cores: not measured"
    resolution_ns = float(np.median([core.figures.resolution_ns for core in noise.cores]))
    span_ns = float(np.median([core.figures.span_ns for core in noise.cores]))
    return (
        f"noise of {plural(len(noise.cores), 'core')}, {format_duration(span_ns)} each, detours from "
        f"{format_duration(resolution_ns)} on"
    )


def usual_loss_words(noise: NoiseRecord) -> str:
    """Return what a core usually loses; empty if none was measured."""
    shares = [core.figures.share for core in noise.cores]
    return f"a core usually loses {percent(float(np.median(shares)))} of the time" if shares else ""


def period_words(figures: CoreFigures) -> str:
    """Return what recurs on a core, and how much of the time it costs: `0.8 % by what recurs every 4.00 ms`."""
    if figures.period_ns is None or figures.period_share is None:
        return "no period"
    return f"{percent(figures.period_share)} by what recurs every {format_duration(figures.period_ns)}"


def link_share(row: DeviceRate) -> str:
    """Return what the faster direction reaches of a device's PCIe link; empty if its rate is unknown."""
    return "" if row.limit is None else percent(max(row.to_device, row.from_device) / row.limit)


def memory_kind(row: DeviceRate) -> str:
    """Return whether the host's memory is pinned."""
    return "pinned" if row.is_pinned else "not pinned"
