"""How often `hpcpace compare` is right on real runs: `python -m experiments.compare_lab`. Needs root and Slurm.

Jobs on four hosts of a lab, of real processes and a real network, whose computation is a sleep of known length. One job
makes several runs, one after the other, because starting its processes takes most of the time. Healthy runs alternate
with such in which one host sleeps 5 % longer. A/A pairs are neighbouring healthy runs, so that each run is in two of
them; a slower run is compared with the healthy one before it. Runs stay in the folder, and the next call goes on there.

Options:
  --folder PATH     where runs are and go; below /var/tmp
  --healthy N       healthy runs in all [51]
  --slower N        runs with a slower host in all [20]
  --minutes X       start no more jobs after this time [9]
  --steps N         [30]
  --runs-per-job N  [8]
  --only-judge      run no jobs
  --job PORT...     be a rank of a job, with this port and plan
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.compare_synthetic import JudgedPair, judge_pair, score_lines
from experiments.labs import JobQueue
from experiments.options import command_line
from experiments.pages import ROOT
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

HOSTS = ("n1", "n2", "n3", "n4")
COMPUTE_MS = 300.0
SLOWER = 0.05
_JOB_TIMEOUT_S = 300.0
_FIRST_PORT = 29600
_PROGRAM = (sys.executable, "-m", "experiments.compare_lab", "--job")
_ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HPCPACE_CLOCK_INTERVAL_S": "5",
}


@dataclass(frozen=True, kw_only=True)
class LabRun:
    """One run of a job; `slower` is the host that sleeps longer, `load` the machine's load average when it ended."""

    run: str
    job: int
    slower: str
    load: float


def main() -> None:
    args = command_line(__doc__)
    if args.job:
        run_job(args.job[0], json.loads(Path(args.job[1]).read_text()))
        return
    if args.folder is None:
        sys.exit("--folder is needed")
    record = args.folder / "runs.json"
    runs = [LabRun(**run) for run in json.loads(record.read_text())] if record.exists() else []
    planned = list(plan(args.healthy, args.slower))
    if not args.only_judge and len(runs) < len(planned):
        args.folder.mkdir(parents=True, exist_ok=True)
        _run(args, runs, planned, record)
    for line in judged(runs):
        print(line)


def plan(num_healthy: int, num_slower: int) -> Iterator[str]:
    """Yield the slower host of each job in order; empty for healthy ones."""
    slower_after = [round((number + 0.5) * num_healthy / max(num_slower, 1)) for number in range(num_slower)]
    for number in range(num_healthy):
        yield ""
        for count in range(slower_after.count(number)):
            yield HOSTS[(number + count) % len(HOSTS)]


def _run(args: argparse.Namespace, runs: list[LabRun], planned: list[str], record: Path) -> None:
    end_s = time.monotonic() + 60 * args.minutes
    # Links fast enough for a small job not to be bound by them.
    with Lab.up(LabConfig(name="compare", tmp_size="32MiB", link="10gbit", uplink="10gbit")) as lab:
        queue = JobQueue(lab)
        while len(runs) < len(planned) and time.monotonic() < end_s:
            begin_s = time.monotonic()
            job = max((run.job for run in runs), default=-1) + 1
            slower = planned[len(runs) : len(runs) + args.runs_per_job]
            folders = [str(args.folder.resolve() / f"{job}-{number}-{time.time_ns()}") for number in range(len(slower))]
            plan_file = args.folder.resolve() / "plan.json"
            plan_file.write_text(json.dumps([_planned(*one, args.steps) for one in zip(folders, slower, strict=True)]))
            done = queue.run(
                *("srun", "--mpi=none", f"-N{len(HOSTS)}", "--ntasks-per-node=1", *_PROGRAM),
                *(str(_FIRST_PORT + job % 1000), str(plan_file)),
                cwd=args.folder.resolve(),
                environ=_ENVIRON,
                timeout_s=_JOB_TIMEOUT_S,
            )
            if done.returncode:
                print(f"failed: {done.stderr[-500:]}", flush=True)
                continue
            load = os.getloadavg()[0]
            runs += [
                LabRun(run=path, job=job, slower=host, load=load) for path, host in zip(folders, slower, strict=True)
            ]
            record.write_text(json.dumps([asdict(run) for run in runs], indent=1))
            print(
                f"{len(runs)} of {len(planned)} runs, {time.monotonic() - begin_s:.0f} s, load {load:.1f}", flush=True
            )


def _planned(run: str, slower: str, steps: int) -> dict[str, object]:
    return {
        "run": run,
        "steps": steps,
        "sleep_ms": {host: COMPUTE_MS * (1 + SLOWER * (host == slower)) for host in HOSTS},
    }


def run_job(port: str, planned: Sequence[dict[str, Any]]) -> None:
    """Run several runs one after the other in the processes of one job, as one of its ranks under srun.

    Each is a run of its own with its own session. Its computation is a sleep, as on a GPU, and one all_reduce ends it.
    """
    import torch
    import torch.distributed as dist

    import hpcpace

    place = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
    dist.init_process_group("gloo", init_method=f"tcp://n1:{port}", **place)
    gradient = torch.ones(100_000)
    mesh = {"mesh": {"dp": place["world_size"]}, "coords": {"dp": place["rank"]}}
    for one in planned:
        sleep_s = one["sleep_ms"][socket.gethostname().partition(".")[0]] / 1e3
        with hpcpace.session(run_dir=one["run"], samples_unit="samples", warmup_steps=3, **mesh) as session:
            for _ in range(one["steps"]):
                with session.phase("forward"):
                    time.sleep(sleep_s)
                dist.all_reduce(gradient)
                session.step(samples=8)
    dist.destroy_process_group()


def judged(runs: list[LabRun]) -> Iterator[str]:
    """Yield what compare says of all pairs."""
    healthy = [run for run in runs if not run.slower]
    same = [judge_pair([Path(one.run)], [Path(two.run)]) for one, two in pairwise(healthy)]
    slow: list[JudgedPair] = []
    before = ""
    for run in runs:
        if run.slower and before:
            slow.append(judge_pair([Path(before)], [Path(run.run)], run.slower))
        before = before if run.slower else run.run
    yield from score_lines(same, slow)
    shares = ", ".join(f"{100 * pair.share:+.1f}" for pair in same)
    yield f"A/A differences in percent: {shares}"
    yield "slower host, differences in percent: " + ", ".join(
        f"{100 * pair.share:+.1f} ({' '.join(pair.named) or 'none'})" for pair in slow
    )
    loads = [run.load for run in runs]
    if loads:
        num_jobs = len({run.job for run in runs})
        yield f"{len(runs)} runs of {num_jobs} jobs, load average {min(loads):.1f} to {max(loads):.1f}"


if __name__ == "__main__":
    main()
