"""JSON files in run directories: run.json, summary.json, trial.json, notices of hangs, and the index of a history."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.damage.hostile import documents
from experiments.damage.hostile.documents import one_of, size_bytes, sound_run
from experiments.damage.hostile.kind import Call, Random
from hpcpace.core.config import Config
from hpcpace.core.rundir import HISTORY_INDEX, RunDirectory, json_text
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.hang.notices import Notice, NoticedCall, NoticedCount, NoticedGroup, ThreadStack, write
from hpcpace.runs.history_index import indexed_runs
from hpcpace.trace.attempt_reader import read_attempt


def _commands(folder: Path, run: Path) -> tuple[tuple[str, ...], ...]:
    """Return the commands that read the files of a run."""
    other = str(sound_run(folder / "other", nodes=4))
    return (
        ("report", str(run)),
        ("list", str(folder)),
        ("list", str(folder), "--json"),
        ("history", str(folder)),
        ("compare", other, str(run)),
        ("scale", other, str(run)),
        ("watch", str(run), "--once"),
        ("hang", str(run)),
        ("timeline", str(run)),
        ("collect", str(run), "--trace-dir", str(run)),
        ("audit", "--from", str(run)),
    )


def _put(name: str, folder: Path, content: bytes, random: Random) -> Call:
    """Put a file into a sound run and call a command that reads it."""
    run = sound_run(folder / "run")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    arguments = one_of(_commands(folder, run), random)
    return Call(arguments=arguments, num_bytes=size_bytes(folder))


def _put_index(folder: Path, content: bytes, random: Random) -> Call:
    (folder / HISTORY_INDEX).write_bytes(content)
    return Call(arguments=("history", str(folder)), num_bytes=size_bytes(folder))


def _record(_: Path) -> Any:
    return {
        "schema": "hpcpace-run/1",
        "name": "run",
        "created_unix_ns": 1_790_000_000_000_000_000,
        "ranks": [{"rank": rank, "host": f"n{rank}", "node": rank, "pid": 100 + rank} for rank in range(2)],
        "versions": {"hpcpace": "0.1.0", "python": "3.11.7", "torch": "2.9.0"},
        "environment": {"SLURM_JOB_ID": "17", "HPCPACE_LAB_EMULATION": "1"},
        "command": ["python", "train.py"],
        "config": {"trace": {"trace_dir": "/nonexistent", "detail": "full"}, "pace": {"policy": "auto"}},
        "workload": {"name": "gpt2", "parameters": 1000, "mesh": "dp=2"},
        "network": {"interfaces": [{"name": "eth0", "speed_mbps": 100}]},
        "clock": {"offsets_ns": [0, 1]},
    }


@cache
def _summary_text() -> str:
    with tempfile.TemporaryDirectory() as name:
        run = RunDirectory(sound_run(Path(name) / "run"))
        attempt = run.attempts()[-1]
        return json_text(analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary.to_json())


_CALL = NoticedCall(group="default_pg", op="all_reduce", seq=20, size_bytes=8, peer=-1, entered_ns=8 * 10**9, step=19)


@cache
def _notice_text() -> str:
    notice = Notice(
        rank=0, host="n0", pid=100, host_key="n0", time_ns=9 * 10**9, unix_ns=1_790_000_000 * 10**9,
        first_time_ns=8 * 10**9,
        num_looks=2, step=19, step_age_ns=60 * 10**9, limit_ns=30 * 10**9, usual_step_ns=10**8, is_first_step=False,
        groups=(NoticedGroup(name="default_pg", members=(0, 1)),),
        calls=(_CALL,),
        entered=(NoticedCount(group="default_pg", source=-1, destination=-1, num_entered=21),),
        is_complete=True, stacks=(ThreadStack(name="MainThread", is_training=True, frames=("train.py:1 in main",)),),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        attempt = RunDirectory(Path(name) / "run").new_attempt()
        write(attempt, notice)
        return attempt.hang_file(0).read_text()


def _trial(_: Path) -> Any:
    effect = {"value": 0.03, "interval": [0.01, 0.05]}
    return {
        "schema": "hpcpace-trial/1",
        "policy": "auto",
        "tried": "delay",
        "is_on": True,
        "sentence": "pacing on: 3 % faster",
        "reason": "",
        "points": [{"name": "optimizer", "share": 0.5}],
        "mechanisms": ["gc"],
        "facts": {"gc_share": 0.1},
        "seed": 1,
        "trial": {"outcome": "kept", "effect": effect, "is_on": True},
        "num_harms": 0,
        "collections": {"off": {"count": 1}, "on": {"count": 0}},
    }


def _index(folder: Path) -> Any:
    sound_run(folder / "run")
    indexed_runs(folder, Config(), progress=lambda done, total: None)
    return json.loads((folder / HISTORY_INDEX).read_text())


_FORMAT = "JSON files of a run"
_NOTICE = "attempt-0/hang/rank-00000.json"
_REPORT = {"most_lines": 100}
"""A report of a few ranks has about 80."""
KINDS = (
    *documents.kinds("run-json", _FORMAT, _record, partial(_put, "attempt-0/run.json"), **_REPORT),
    *documents.kinds(
        "summary-json", _FORMAT, lambda _: json.loads(_summary_text()), partial(_put, "summary.json"), **_REPORT
    ),
    *documents.kinds("trial-json", _FORMAT, _trial, partial(_put, "attempt-0/trial.json"), **_REPORT),
    *documents.kinds("notice", _FORMAT, lambda _: json.loads(_notice_text()), partial(_put, _NOTICE), **_REPORT),
    *documents.kinds("history-index", _FORMAT, _index, _put_index),
)
