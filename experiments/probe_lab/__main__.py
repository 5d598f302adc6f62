"""Measures the pairs of a lab's hosts, healthy and with slow links, beside the truth and other programs.

sudo .venv/bin/python -m experiments.probe_lab --write

One lab is booted, in which one job measures again and again (`experiments.probe_lab.ranks`). Before each measurement
one link is slowed, or none. Needs sockperf and iperf3.

Options:
  --slow N     how many hosts' links to slow down, and how many uplinks [10]
  --healthy N  how many measurements without a slow link [20]
  --most-s X   begin no measurement after this time [420]
  --seed N     of the links and rates [0]
  --write      write docs/results/probe-lab.md
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.labs import inject
from experiments.options import command_line
from experiments.pages import ROOT, write_page
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

HOSTS, LEAVES = 8, 4
LINK_MBIT, UPLINK_MBIT = 400, 600
DATA_SHARE = 1448 / 1514
"""Of a segment of 1,514 bytes on the wire, as the lab's shapers count, 1,448 are data."""
_SHARES = (0.1, 0.7)
"""Of its rate, what a slow link is left."""
_TIME_S, _START_S, _MEASURE_S, _POLL_S = 14.0, 300.0, 120.0, 0.1
_PEERS_S, _READY_S, _PORT = 3, 1.0, 23_456


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
        kind: `healthy`, `host link` or `uplink`.
        link: name of the link in the lab, like `n3` or `leaf2`; empty for none.
        rate_mbit: to which it was slowed.
        named: what the probe named as slow, `or` between what it could not separate.
        measured_mbit: rate of data of the slow link, or the usual one of hosts' links.
        latency_us: median half round trip between n1 and n2.
        load: load average of the machine, over a minute.
    """

    kind: str
    link: str
    rate_mbit: float
    named: tuple[str, ...] = ()
    measured_mbit: float = 0.0
    latency_us: float = 0.0
    load: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the probe named the slow link alone, or nothing where there is none."""
        return self.named == ((self.target,) if self.link else ())

    @property
    def target(self) -> str:
        """The link as the probe names it."""
        return f"{self.link} uplink" if self.kind == "uplink" else self.link

    @property
    def error(self) -> float:
        """Rate measured by the rate of data that the shaper allows, minus 1."""
        return self.measured_mbit / (self.rate_mbit * DATA_SHARE) - 1


def main() -> None:
    args = command_line(__doc__)
    rates = {"link": f"{LINK_MBIT}mbit", "uplink": f"{UPLINK_MBIT}mbit"}
    config = LabConfig(name="probe-lab", hosts=HOSTS, leaves=LEAVES, share=(str(ROOT),), **rates)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="probe-lab-", dir=ROOT) as name, Lab.up(config) as lab:
        folder = Path(name)
        with _job(lab, folder):
            end_s = time.monotonic() + args.most_s
            for number, case in enumerate(planned(args.slow, args.healthy, args.seed)):
                if time.monotonic() > end_s:
                    break
                cases.append(_measured(lab, case, number, folder))
                print("right" if cases[-1].is_right else "WRONG", cases[-1], file=sys.stderr, flush=True)
        iperf_mbit, sockperf_us = peers(lab)
    print(f"iperf3 {iperf_mbit:.1f} Mb/s, sockperf {sockperf_us:.1f} us", file=sys.stderr)
    if args.write:
        sizes = {"hosts": HOSTS, "leaves": LEAVES, "link_mbit": LINK_MBIT, "uplink_mbit": UPLINK_MBIT}
        values = figures_page(cases, iperf_mbit, sockperf_us)
        write_page("probe-lab", seed=args.seed, data_share=DATA_SHARE, **sizes, **values)


def planned(num_slow: int, num_healthy: int, seed: int) -> list[Case]:
    """Return the cases in random order: hosts and switches in turn, at random rates of 10 to 70 % of the usual."""
    random = np.random.default_rng(seed)
    cases = [Case(kind="healthy", link="", rate_mbit=LINK_MBIT) for _ in range(num_healthy)]
    for kind, name, units, usual in (("host link", "n", HOSTS, LINK_MBIT), ("uplink", "leaf", LEAVES, UPLINK_MBIT)):
        for number, share in enumerate(random.uniform(*_SHARES, num_slow).tolist()):
            cases.append(Case(kind=kind, link=f"{name}{number % units + 1}", rate_mbit=round(usual * share)))
    return [cases[number] for number in random.permutation(len(cases))]


@contextmanager
def _job(lab: Lab, folder: Path) -> Iterator[None]:
    """Run the ranks that measure, one on each host, for as long as the context lasts."""
    words = [sys.executable, "-P", "-m", "experiments.probe_lab.ranks", str(folder), str(_TIME_S)]
    srun = ["srun", "-N", str(HOSTS), "--ntasks-per-node", "1", "--mpi=none", *words]
    environ = {**lab.environ(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(lab.command(srun, folder=ROOT), env=environ, stdin=subprocess.DEVNULL) as job:
        try:
            for rank in range(HOSTS):
                _wait_for(folder / f"ready-{rank}", _START_S, job)
            yield
        finally:
            (folder / "end").touch()


def _wait_for(file: Path, timeout_s: float, job: subprocess.Popen[bytes] | None = None) -> None:
    end_s = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > end_s or (job is not None and job.poll() is not None):
            raise RuntimeError(f"{file.name} did not come: see what the ranks printed")
        time.sleep(_POLL_S)


def _measured(lab: Lab, case: Case, number: int, folder: Path) -> Case:
    """Slow a link, measure, undo it, and return the case with what was found."""
    fault_id = inject(lab, "slow-link", case.link, "--rate", f"{case.rate_mbit:.0f}mbit") if case.link else ""
    try:
        (folder / f"go-{number}").touch()
        _wait_for(folder / f"done-{number}.json", _MEASURE_S)
    finally:
        if fault_id:
            inject(lab, "undo", fault_id)
    return judged(case, json.loads((folder / f"done-{number}.json").read_text()), os.getloadavg()[0])


def judged(case: Case, pairs: Mapping[str, Any], load: float) -> Case:
    """Return a case with what the probe found."""
    found = pairs["findings"]
    rates = [one["value"] for one in found if one["measure"] != "latency" and case.target in one["names"]]
    return replace(
        case,
        named=tuple(" or ".join(one["names"]) for one in found),
        measured_mbit=8e-6 * (rates[0] if rates else pairs["usual"]),
        latency_us=min(1e-3 * row["p50_ns"] for row in pairs["rows"] if {row["first"], row["second"]} == {"n1", "n2"}),
        load=load,
    )


def peers(lab: Lab) -> tuple[float, float]:
    """Return the rate between n1 and n2 as iperf3 measures it, Mb/s, and the latency as sockperf does, us."""
    first, second = lab.plan.hosts[:2]
    server = ["iperf3", "-s", "-1", "-p", str(_PORT)]
    client = ["iperf3", "-c", second.address, "-p", str(_PORT), "-t", str(_PEERS_S), "-J"]
    rate = json.loads(_served(lab, second.name, server, first.name, client))["end"]["sum_received"]["bits_per_second"]
    place = ["--tcp", "-i", second.address, "-p", str(_PORT + 1)]
    client = ["sockperf", "ping-pong", *place, "-t", str(_PEERS_S)]
    text = _served(lab, second.name, ["sockperf", "server", *place], first.name, client)
    found = re.search(r"percentile 50\.000 = +([0-9.]+)", text)
    return rate / 1e6, float(found[1]) if found else float("nan")


def _served(lab: Lab, server_host: str, server: Sequence[str], client_host: str, client: Sequence[str]) -> str:
    """Return what a client prints whose server runs on another host meanwhile."""
    on = ["srun", "-n", "1", "-w"]
    command = lab.command([*on, server_host, *server])
    with subprocess.Popen(command, env=lab.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as serving:
        time.sleep(_READY_S)
        try:
            done = lab.run(*on, client_host, *client)
            return done.stdout + done.stderr
        finally:
            serving.terminate()


def counts(cases: Sequence[Case]) -> Iterator[tuple[object, ...]]:
    """Yield for each kind of link how many measurements named it alone, with others, nothing, or something else."""
    for kind in ("host link", "uplink", "healthy"):
        own = [case for case in cases if case.kind == kind]
        alone = sum(bool(case.link) and case.is_right for case in own)
        nothing = sum(not case.named for case in own)
        among = sum(
            bool(case.link) and not case.is_right and any(case.target in name.split(" or ") for name in case.named)
            for case in own
        )
        shown = ("-", "-") if kind == "healthy" else (alone, among)
        yield kind, len(own), *shown, nothing, len(own) - alone - nothing - among


def errors(cases: Sequence[Case]) -> str:
    """Return by how much rates are off, in words."""
    found = [100 * abs(case.error) for case in cases]
    return f"{statistics.median(found):.1f} % in the median, {max(found):.1f} % at most" if found else "-"


def figures_page(cases: Sequence[Case], iperf_mbit: float, sockperf_us: float) -> dict[str, Any]:
    """Return what the page has of the measurements and of the other programs."""
    healthy = [case for case in cases if not case.link]
    return {
        "counts": list(counts(cases)),
        "usual_mbit": statistics.median(case.measured_mbit for case in healthy),
        "iperf_mbit": iperf_mbit,
        "usual_error": errors(healthy),
        "slow_error": errors([case for case in cases if case.link and case.is_right]),
        "latency_us": statistics.median(case.latency_us for case in healthy),
        "sockperf_us": sockperf_us,
        "links": sorted((case for case in cases if case.link), key=lambda each: (each.kind, each.link, each.rate_mbit)),
        "loads": [case.load for case in cases],
    }


if __name__ == "__main__":
    main()
