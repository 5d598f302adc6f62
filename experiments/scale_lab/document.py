"""The table of what was predicted and measured, as a document."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from experiments.scale_lab.judge import Judged
from experiments.scale_lab.setups import UPLINK_MBIT

_HEAD = (
    "| set-up | injected | said to stop it | step at 8 | 16: predicted (95 %) | measured | 32: predicted (95 %) "
    "| measured |"
)
_TITLES = {"simulated": "Simulated jobs", "lab": "Real jobs in a lab"}


def line(one: Judged) -> str:
    """Return a set-up as one line."""
    points = "; ".join(
        f"{point.num_hosts}: {point.measured_ms:.1f} ms in {point.low_ms:.1f}-{point.high_ms:.1f}"
        f"{'' if point.is_inside else ' NO'}"
        for point in one.points
    )
    return f"{one.setup.name}: {one.stopped_by or 'nothing'} {'' if one.is_named else 'NO '}({points})"


def document(found: Mapping[str, Sequence[Judged]]) -> str:
    """Return the document of all that was done."""
    return (
        "\n\n".join(
            [
                "# Scaling, held against sizes that it has not seen",
                f"Written by `python -m experiments.scale_lab {' '.join(f'--{name}' for name in found)} --write` on "
                f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.0f}. "
                "In each set-up one thing is injected, at 1 to 32 hosts with one rank each; computation is emulated by "
                "sleeping. `hpcpace scale` sees 1, 2, 4 and 8 hosts ([scale.md](scale.md)). The mean step time at 16 "
                "and 32 hosts should be in its interval, and the part that it says stops the job should be the "
                "injected one.",
                *(_section(name, rows) for name, rows in found.items()),
            ]
        )
        + "\n"
    )


def _section(name: str, rows: Sequence[Judged]) -> str:
    num_points = sum(len(one.points) for one in rows)
    inside = sum(point.is_inside for one in rows for point in one.points)
    whole = sum(all(point.is_inside for point in one.points) for one in rows)
    text = (
        f"{inside} of {num_points} held-out sizes are inside, in {whole} of {len(rows)} set-ups all of them; the part "
        f"is named right in {sum(one.is_named for one in rows)} of {len(rows)}."
    )
    if name == "lab":
        text += (
            f" Communication is real, by gloo over links of 1 Gb/s and uplinks of {UPLINK_MBIT} Mb/s, one for each "
            "host; all hosts share the cores of one machine, so that transfers of many ranks also wait for a core."
        )
    cells = [_row(one) for one in rows]
    return "\n".join([f"## {_TITLES[name]}", "", text, "", _HEAD, "|---" * 8 + "|", *cells])


def _row(one: Judged) -> str:
    of_points = (
        " | ".join(
            f"{point.predicted_ms:.1f} ms ({point.low_ms:.1f} to {point.high_ms:.1f}) | {point.measured_ms:.1f} ms"
            f"{'' if point.is_inside else ' (outside)'}"
            for point in one.points
        )
        or "not measured | | |"
    )
    said = one.stopped_by or "nothing"
    known = f"{one.setup.name} | {one.setup.part} | {said}, {100 * one.lost:.0f} % | {one.largest_ms:.1f} ms"
    return f"| {known} | {of_points} |"
