"""Measures the pairs of a lab's hosts, healthy and with slow links, beside the truth and other programs.

sudo .venv/bin/python -m experiments.probe_lab --write docs/probe-lab.md

One lab is booted, in which one job measures again and again (`experiments.probe_lab.ranks`). Before each measurement
one link is slowed, or none. Needs sockperf and iperf3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.probe_lab.cases import HOSTS, LEAVES, LINK_MBIT, UPLINK_MBIT, Case, judged, planned
from experiments.probe_lab.document import write_document
from experiments.probe_lab.peers import measure_peers
from hpcpace.config import LabConfig
from hpcpace.lab.lab import Lab
from hpcpace.lab.namespaces import NAME_VARIABLE

ROOT = Path(__file__).parents[2]
NAME = "probe-lab"
_TIME_S = 14.0
_START_S, _MEASURE_S = 300.0, 120.0
_POLL_S = 0.1


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", type=int, default=10, help="how many hosts' links to slow down, and how many uplinks")
    parser.add_argument("--healthy", type=int, default=20, help="how many measurements without a slow link")
    parser.add_argument("--most-s", type=float, default=420.0, help="begin no measurement after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the links and rates")
    parser.add_argument("--write", type=Path, help="write the document here")
    args = parser.parse_args()
    config = LabConfig(
        name=NAME, hosts=HOSTS, leaves=LEAVES, link=f"{LINK_MBIT}mbit", uplink=f"{UPLINK_MBIT}mbit", share=(str(ROOT),)
    )
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="probe-lab-", dir=ROOT) as folder, Lab.up(config) as lab:
        with _job(lab, Path(folder)):
            end_s = time.monotonic() + args.most_s
            for number, case in enumerate(planned(args.slow, args.healthy, args.seed)):
                if time.monotonic() > end_s:
                    break
                cases.append(_measured(case, number, Path(folder)))
                print("right" if cases[-1].is_right else "WRONG", cases[-1], file=sys.stderr, flush=True)
        peers = measure_peers(lab)
    print(peers, file=sys.stderr)
    if args.write is not None:
        write_document(args.write, cases, peers, seed=args.seed)
        print(f"written: {args.write}")


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


def _measured(case: Case, number: int, folder: Path) -> Case:
    """Slow a link, measure, undo it, and return the case with what was found."""
    if case.link:
        fault_id = _lab("fault", "slow-link", case.link, "--rate", f"{case.rate_mbit:.0f}mbit").split()[0]
    try:
        (folder / f"go-{number}").touch()
        _wait_for(folder / f"done-{number}.json", _MEASURE_S)
    finally:
        if case.link:
            _lab("fault", "undo", fault_id)
    return judged(case, json.loads((folder / f"done-{number}.json").read_text()), os.getloadavg()[0])


def _lab(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "hpcpace", "lab", *words]
    environ = {**os.environ, NAME_VARIABLE: NAME}
    return subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
