"""Writes docs/results/probe-lab.md from the cases of an experiment."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.probe_lab.cases import DATA_SHARE, HOSTS, LEAVES, LINK_MBIT, UPLINK_MBIT, Case
from experiments.probe_lab.peers import Peers

_HEAD = f"""# The probe in the lab

How often the pairs of `hpcpace probe` name the link that was slowed, and how close its figures are to what the lab's
links carry and what other programs measure. Written by

```
sudo .venv/bin/python -m experiments.probe_lab --write docs/results/probe-lab.md
```

The lab has {HOSTS} hosts on {LEAVES} switches, links of {LINK_MBIT} Mb/s and uplinks of {UPLINK_MBIT} Mb/s. All
measurements are those of one job in one lab that was booted once; before each, one link was slowed to 10 to 70 % of its
rate, or none. A link counts as named alone if the probe names it and nothing else.
"""


def write_document(file: Path, cases: Sequence[Case], peers: Peers, *, seed: int) -> None:
    """Write the document."""
    loads = [case.load for case in cases]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        _HEAD,
        f"Measured on {date}, seed {seed}, with a load average of {min(loads):.0f} to {max(loads):.0f} on 2 cores.",
        "",
        "| slowed | measurements | named alone | named with others | nothing named | something else named |",
        "|---|---|---|---|---|---|",
        *(_counts(kind, cases) for kind in ("host link", "uplink", "healthy")),
        "",
        "## Rates and latencies",
        "",
        f"Shapers count headers: of each 1,514 bytes 1,448 are data, {100 * DATA_SHARE:.1f} %. Rates of data are",
        "compared with that share of the shaped rate.",
        "",
        "| figure | value |",
        "|---|---|",
        *_figures(cases, peers),
        "",
        "Both programs wait in the kernel, and an idle machine takes longer to wake a core than to carry the message:",
        "the latency of sockperf was 36 us on an idle machine and 11 us while other jobs kept its cores awake.",
        "",
        "## Every slowed link",
        "",
        "| link | slowed to (Mb/s) | measured data (Mb/s) | error | named |",
        "|---|---|---|---|---|",
        *(_row(case) for case in sorted(cases, key=lambda each: (each.kind, each.link, each.rate_mbit)) if case.link),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _counts(kind: str, cases: Sequence[Case]) -> str:
    own = [case for case in cases if case.kind == kind]
    alone = [case for case in own if case.link and case.is_right]
    nothing = [case for case in own if not case.named]
    among = [
        case
        for case in own
        if case not in alone and case.link and any(case.target in name.split(" or ") for name in case.named)
    ]
    other = len(own) - len(alone) - len(nothing) - len(among)
    alone_words = str(len(alone)) if kind != "healthy" else "-"
    among_words = str(len(among)) if kind != "healthy" else "-"
    return f"| {kind} | {len(own)} | {alone_words} | {among_words} | {len(nothing)} | {other} |"


def _figures(cases: Sequence[Case], peers: Peers) -> list[str]:
    healthy = [case for case in cases if not case.link]
    errors = [abs(case.error) for case in cases if case.link and case.is_right]
    usual_errors = [abs(case.error) for case in healthy]
    usual = statistics.median(case.measured_mbit for case in healthy)
    latency_us = statistics.median(case.latency_us for case in healthy)
    return [
        f"| usual rate of a host's link, median of healthy measurements | {usual:.1f} Mb/s |",
        f"| iperf3, n1 to n2, same lab | {peers.iperf_mbit:.1f} Mb/s ({100 * (usual / peers.iperf_mbit - 1):+.1f} %) |",
        f"| error of that usual rate | {_errors(usual_errors)} |",
        f"| error of the rates of slowed links that were named | {_errors(errors)} |",
        f"| latency n1 to n2, median of healthy measurements | {latency_us:.1f} us |",
        f"| sockperf over TCP, n1 to n2, same lab | {peers.sockperf_us:.1f} us "
        f"({100 * (latency_us / peers.sockperf_us - 1):+.0f} %) |",
    ]


def _errors(errors: Sequence[float]) -> str:
    if not errors:
        return "-"
    return f"{100 * statistics.median(errors):.1f} % in the median, {100 * max(errors):.1f} % at most"


def _row(case: Case) -> str:
    error = f"{100 * case.error:+.1f} %" if case.is_right else "-"
    named = ", ".join(case.named) or "-"
    return f"| {case.target} | {case.rate_mbit:.0f} | {case.measured_mbit:.1f} | {error} | {named} |"
