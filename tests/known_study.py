"""A nano-cluster study whose truth is known: synthetic runs, with counters of an interface that grow evenly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.synthetic_run import START_NS, SyntheticRun
from hpcpace.core.rundir import Attempt
from hpcpace.studies.setups import Setup, StudyFolder, StudyRun, repeated
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

STEP_S = 0.036
"""Of a synthetic run of several ranks; that of a single rank has no transfer, and takes 2 ms less."""
SECOND_NS = 1_000_000_000
PEAK_BYTES = 3 << 30
_UNKNOWN = (0,) * 9  # counters that these interfaces do not have


@dataclass(frozen=True, kw_only=True)
class CountedRun(SyntheticRun):
    """A synthetic run whose servers count bytes once a second, on `lo` ten times as much as on `eth0`."""

    servers: int = 1
    bytes_per_s: int = 0

    def _open(self, attempt: Attempt, rank: int) -> Recorder:
        per_server = self.num_ranks // self.servers
        header = TraceHeader(
            run_id="synthetic",
            attempt=attempt.number,
            rank=rank,
            world_size=self.num_ranks,
            local_rank=rank % per_server,
            local_size=per_server,
            node=rank // per_server,
            host=f"n{rank // per_server + 1}",
            host_key=f"key-{rank // per_server}",
            mesh=f"dp={self.num_ranks},pp=1,tp=1",
            dp=rank,
            pp=0,
            tp=0,
            samples_unit="tokens",
            interfaces=("lo", "eth0"),
        )
        recorder = Recorder(attempt.trace_file(rank), header, warn=_fail, clock=lambda: START_NS)
        for member in range(self.num_ranks):
            recorder.add_group(0, member, b"default", b"gloo")
        if header.local_rank == 0:
            for second in range(-1, 8):
                now_ns, count = START_NS + second * SECOND_NS, (second + 1) * self.bytes_per_s
                recorder.add_network(now_ns, 0, 10 * count, 10 * count, *_UNKNOWN)
                recorder.add_network(now_ns, 1, count // 4, count - count // 4, *_UNKNOWN)
        return recorder


def _fail(message: str) -> None:
    raise AssertionError(message)


def write_study(path: Path, setups: Sequence[Setup], *, repetitions: int = 1, bytes_per_s: int = 0) -> StudyFolder:
    """Write a plan and all of its runs: 40 steps of 64 tokens each, two of them warm-up."""
    study = StudyFolder(path)
    study.write_plan("known", repeated(setups, repetitions))
    for run in study.runs():
        write_run(study, run, bytes_per_s=bytes_per_s)
    return study


def write_run(study: StudyFolder, run: StudyRun, *, bytes_per_s: int = 0) -> None:
    """Write one finished run of a study."""
    layout = run.setup.layout
    made = CountedRun(num_ranks=layout.num_ranks, servers=layout.servers, bytes_per_s=bytes_per_s)
    attempt = made.write(study.run_dir(run).path).attempts()[-1]
    memory = [
        {"rank": rank, "host": "n1", "rss_bytes": PEAK_BYTES + rank, "device_bytes": 0}
        for rank in range(layout.num_ranks)
    ]
    attempt.result_json.write_text(json.dumps({"outcome": "finished", "peak_memory": memory}))
