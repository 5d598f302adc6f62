"""Runs one after the other in the processes of one job, under srun: compare_lab_job.py PORT PLAN.

Each is a run of its own with its own session. Its computation is a sleep, as on a GPU, and one all_reduce ends it. PLAN
is a JSON list of {"run": folder, "sleep_ms": {host: milliseconds}, "steps": number}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpcpace

_NUM_WARMUP = 3


def main() -> None:
    place = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
    dist.init_process_group("gloo", init_method=f"tcp://n1:{sys.argv[1]}", **place)
    for planned in json.loads(Path(sys.argv[2]).read_text()):
        _run(planned, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def _run(planned: dict[str, Any], rank: int, world_size: int) -> None:
    sleep_s = planned["sleep_ms"][socket.gethostname().partition(".")[0]] / 1e3
    gradient = torch.ones(100_000)
    with hpcpace.session(
        run_dir=Path(planned["run"]),
        mesh={"dp": world_size},
        coords={"dp": rank},
        samples_unit="samples",
        warmup_steps=_NUM_WARMUP,
    ) as session:
        for _ in range(planned["steps"]):
            with session.phase("forward"):
                time.sleep(sleep_s)
            dist.all_reduce(gradient)
            session.step(samples=8)


if __name__ == "__main__":
    main()
