"""Runs jobs with faults of links in the lab, and counts which links their reports name. Needs root and Slurm's lab.

    flock /tmp/lab.lock python -m experiments.links run --minutes 10 --hosts 4 --layouts dp
    python -m experiments.links judge --write

`run` goes on where it stopped: what has run is kept in the folder and reported again by `judge`, with today's rules.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from experiments.links.cases import CASES, LAYOUTS, SIZES, LinkJob, jobs, lab_config
from experiments.links.judge import judge_all
from experiments.links.training import TrainingHosts
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import write_json
from hpcpace.lab.lab import Lab

FOLDER = Path("/var/tmp/hpcpace-links")
DOCUMENT = Path(__file__).parents[2] / "docs" / "diagnosis-links.md"
_START_TIMEOUT_S = 120.0
_SETTINGS = {"HPCPACE_AUDIT": "off", "HPCPACE_CLOCK_INTERVAL_S": "5"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.links", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="keep runs in this folder")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run jobs that have not run yet")
    run.add_argument("--minutes", type=float, default=10.0, help="begin no job after this time")
    run.add_argument("--hosts", type=int, choices=[size for size, _ in SIZES], default=4, help="size of the lab")
    run.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="run only these layouts")
    run.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="run only these cases")
    run.add_argument("--repetitions", type=int, default=10, help="of each case, layout and size")
    judging = commands.add_parser("judge", help="report all runs again and count what they name")
    judging.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    args = parser.parse_args()
    if args.command == "judge":
        judge_all(args.folder, DOCUMENT if args.write else None)
        return
    chosen = [
        job
        for job in jobs(args.repetitions)
        if job.num_hosts == args.hosts and job.layout in args.layouts and job.case in args.cases
    ]
    run_jobs(chosen, args.folder, minutes=args.minutes)


def run_jobs(chosen: list[LinkJob], folder: Path, *, minutes: float) -> None:
    """Run the jobs that have not run yet, one after the other in one lab."""
    deadline_s = time.monotonic() + 60 * minutes
    todo = [job for job in chosen if not (folder / job.name / "job.json").exists()]
    if not todo:
        return
    with Lab.up(lab_config(todo[0].num_hosts, todo[0].num_leaves)) as lab, TrainingHosts(lab) as hosts:
        for job in todo:
            if time.monotonic() > deadline_s:
                break
            run_job(lab, hosts, job, folder / job.name)


def run_job(lab: Lab, hosts: TrainingHosts, job: LinkJob, folder: Path) -> None:
    """Run one job with its fault, and write down what was true."""
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    is_late = job.case == "flapping"  # ranks do not find each other while a link is down
    fault_id = _fault(lab, *job.fault) if job.fault and not is_late else ""
    try:
        hosts.start(folder, job.training, _SETTINGS)
        if is_late and _is_traced(folder, job.num_hosts):
            fault_id = _fault(lab, *job.fault)
        codes = hosts.wait()
    finally:
        if fault_id:
            _fault(lab, "undo", fault_id)
    took_s = time.monotonic() - begin_s
    truth = {"codes": codes, "seconds": round(took_s, 1), "load": os.getloadavg()[0], "time": time.time()}
    write_json(folder / "job.json", truth)
    print(f"{job.name}: {json.dumps(truth)}", flush=True)


def _is_traced(folder: Path, num_ranks: int) -> bool:
    """Wait until all ranks have begun to write their traces, and return whether they have in time."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if len(list((folder / "run").glob("attempt-0/trace/rank-*.h5"))) == num_ranks:
            return True
        time.sleep(0.2)
    return False


def _fault(lab: Lab, *words: str) -> str:
    done = lab.run("hpcpace", "lab", "fault", *words)
    if done.returncode:
        raise HpcpaceError(f"lab fault {' '.join(words)} ended with status {done.returncode}: {done.stderr}")
    return done.stdout.split()[0]


if __name__ == "__main__":
    main()
