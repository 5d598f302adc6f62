"""What a job tells its centre: a file of metrics, and a line in the comment of the Slurm job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import each_case
from prometheus_client.parser import text_string_to_metric_families as parse

from hpcpace.core.environment import rank_info
from hpcpace.core.rundir import Attempt
from hpcpace.observe.exporters import Exporters, add_to_comment, metrics_path
from hpcpace.observe.settings import MetricsConfig

LINE = "hpcpace: 3 steps of 100 ms, see hpcpace report runs/17.0-gpt2"
S = 1_000_000_000


def metrics(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in parse(text) for sample in family.samples}


@each_case(
    ("name", "shown"),
    [
        ("17-gpt2", "/runs/17-gpt2"),
        ("a b; $(id)", "'/runs/a b; $(id)'"),
        ("a\nComment=b", "'/runs/a\\nComment=b'"),
        ("hf_" + "aB3dE6gH9jK2" * 3, "'/runs/[redacted]'"),
    ],
    ids=ascii,
)
def test_the_comment_of_a_job_names_its_run_as_a_line_to_paste_without_secrets(name: str, shown: str) -> None:
    recording: Any = SimpleNamespace(recorder=SimpleNamespace(num_dropped=0))
    attempt, world = Attempt(Path("/runs") / name / "attempt-0"), rank_info({})
    exporters = Exporters(MetricsConfig(), world=world, host="n1", attempt=attempt, recording=recording, warn=print)
    assert exporters.line() == f"hpcpace: 0 steps, see hpcpace report {shown}"


def made(path: Path, warnings: list[str] | None = None) -> Exporters:
    recording: Any = SimpleNamespace(
        recorder=SimpleNamespace(num_dropped=2, cost_ns=S // 2), clocks=SimpleNamespace(halfwidth_ns=5000)
    )
    return Exporters(
        MetricsConfig(prometheus=str(path), interval_s=3600.0), world=rank_info({}), host="n1", recording=recording,
        attempt=Attempt(Path('/runs/a"b/attempt-0')), warn=(warnings if warnings is not None else []).append,
        clock=lambda: 50 * S, unix_clock=lambda: 1000 * S,
    )  # fmt: skip


def test_the_metrics_of_a_rank(tmp_path: Path) -> None:
    file = made(tmp_path / "a.prom")
    assert "hpcpace_step_seconds" not in metrics(file.text())
    for second in (46, 47, 48):
        file.end_step(second * S, second * S + S // 2, 32)
    found = metrics(file.text())
    assert found["hpcpace_step_seconds"] == 0.5 and found["hpcpace_last_step_timestamp_seconds"] == 998.5
    assert (found["hpcpace_steps_total"], found["hpcpace_samples_total"]) == (3, 96)
    assert (found["hpcpace_dropped_rows_total"], found["hpcpace_recorder_seconds_total"]) == (2, 0.5)
    assert found["hpcpace_clock_error_seconds"] == 5e-6


def test_a_pipe_in_place_of_the_metrics_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    pipe, warnings = tmp_path / "a.prom", list[str]()
    os.mkfifo(pipe)
    before = pipe.lstat().st_ino
    file = made(pipe, warnings)
    file.start()
    file.write(pipe)
    file.close()
    assert pipe.lstat().st_ino == before
    assert len(warnings) == 1 and "is not replaced by a file" in warnings[0]


def test_the_step_time_is_that_since_the_last_text(tmp_path: Path) -> None:
    file = made(tmp_path / "a.prom")
    file.end_step(0, S, 1)
    file.text()
    file.end_step(S, 4 * S, 1)
    assert metrics(file.text())["hpcpace_step_seconds"] == 3.0
    assert metrics(file.text())["hpcpace_step_seconds"] == 3.0


def test_the_file_goes_at_the_end(tmp_path: Path) -> None:
    file = made(tmp_path / "a.prom")
    file.start()
    file.write(tmp_path / "a.prom")
    assert (tmp_path / "a.prom").exists()
    file.close()
    assert not (tmp_path / "a.prom").exists()


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    file = made(tmp_path / "none" / "a.prom", warnings)
    file.write(tmp_path / "none" / "a.prom")
    file.write(tmp_path / "none" / "a.prom")
    assert len(warnings) == 1 and "metrics cannot be written" in warnings[0]


def test_the_pattern_of_a_path() -> None:
    labels = {"jobid": "17", "step": "", "node": "../n1"}
    assert metrics_path("/a/{jobid}-{step}-{node}-{rank}.prom", labels, 3) == Path("/a/17-none-.._n1-3.prom")


@each_case(
    ("shown", "comment"),
    [
        ("JobId=17 JobName=a\n   UserId=x\n", LINE),
        ("JobId=17\n   Comment=(null)\n   StdErr=x\n", LINE),
        ("JobId=17\n   Comment=my note = 5\n   StdErr=x\n", f"my note = 5; {LINE}"),
        ("JobId=17\n   AdminComment=theirs\n", LINE),
    ],
)
def test_a_line_goes_behind_what_a_user_has_put_there(
    shown: str, comment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(*command: str) -> str:
        calls.append([*command])
        return shown

    monkeypatch.setattr("hpcpace.observe.exporters._output_of", run)
    assert add_to_comment("17", LINE) == ""
    assert calls == [["scontrol", "show", "job", "17"], ["scontrol", "update", "JobId=17", f"Comment={comment}"]]


@pytest.mark.parametrize("shown", [f"   Comment={LINE}\n", f"   Comment={'x' * 990}\n"])
def test_a_line_that_is_there_or_finds_no_room_is_not_added(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr("hpcpace.observe.exporters._output_of", lambda *command: calls.append(command) or shown)
    add_to_comment("17", LINE)
    assert len(calls) == 1


@each_case(
    "error",
    [
        FileNotFoundError("no scontrol"),
        subprocess.TimeoutExpired("scontrol", 5),
        subprocess.CalledProcessError(1, "scontrol", stderr="slurm_update error: Invalid job id\n"),
    ],
)
def test_what_fails_is_said_and_never_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str, **_: Any) -> str:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert add_to_comment("17", LINE)
