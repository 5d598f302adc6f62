"""`hpcpace watch`: what scripts see, exit codes, and wrong input."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpace.core.rundir import RunDirectory, write_json
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader


def header(rank: int, num_ranks: int = 2) -> TraceHeader:
    return TraceHeader(
        run_id="run", attempt=0, rank=rank, world_size=num_ranks, local_rank=rank, local_size=num_ranks, node=0,
        host="n1", host_key="n1", job_id="17", created_unix_ns=1,
    )  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A run of two ranks that write."""
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    write_json(attempt.run_json, {"name": "demo", "created_unix_ns": 1, "ranks": []})
    recorders = []
    now_ns = time.monotonic_ns()
    for rank in range(2):
        recorder = Recorder(attempt.trace_file(rank), header(rank), warn=print)
        for step in range(40):
            begin_ns = now_ns - (40 - step) * 100_000_000
            recorder.add_step(step, begin_ns, begin_ns + 100_000_000, 8, 0)
        recorder.start()
        recorder.flush()
        recorders.append(recorder)
    yield tmp_path / "run"
    for recorder in recorders:
        recorder.close()


def test_once_prints_the_view_without_escape_codes(hpcpace, live: Path) -> None:
    code, out, err = hpcpace("watch", live, "--once")
    assert (code, err) == (0, "") and out.startswith("RUNNING") and "2 of 2 live" in out and "\x1b" not in out


def test_once_as_json_is_one_line(hpcpace, live: Path) -> None:
    code, out, _ = hpcpace("watch", live, "--once", "--json")
    (line,) = out.splitlines()
    state = json.loads(line)
    assert code == 0 and state["schema"] == "hpcpace-watch/1" and state["num_steps"] == 40 and state["jobid"] == "17"


def test_an_attempt_or_a_file_in_a_run_means_the_run(hpcpace, live: Path) -> None:
    for path in (live / "attempt-0", live / "attempt-0" / "trace" / "rank-00000.h5"):
        assert hpcpace("watch", path, "--once")[0] == 0
    assert hpcpace("watch", live / "attempt-0", "--attempt", "1", "--once")[0] == 2


def test_a_rank_without_a_file_is_a_warning(hpcpace, live: Path) -> None:
    for suffix in (".h5", ".journal"):
        (live / "attempt-0" / "trace" / f"rank-00001{suffix}").unlink()
    code, out, _ = hpcpace("watch", live, "--once")
    assert code == 1 and "no file: rank 1" in out


def test_a_run_that_was_killed_has_failed(hpcpace, live: Path) -> None:
    copy = live.with_name("copy")
    shutil.copytree(live, copy)
    for path in copy.rglob("*.journal"):
        os.utime(path, (1, 1))
    code, out, _ = hpcpace("watch", copy, "--once")
    assert code == 4 and out.startswith("SILENT") and "no rank writes any more" in out


def test_of_a_run_that_is_over_the_report_is_named(hpcpace, live: Path) -> None:
    copy = live.with_name("over")
    shutil.copytree(live, copy)
    for path in copy.rglob("*.journal"):
        path.unlink()
    _, out, _ = hpcpace("watch", copy, "--once")
    assert f"hpcpace report {copy}" in " ".join(out.split())


def test_a_run_on_which_nothing_can_be_written_is_watched(hpcpace, live: Path) -> None:
    for folder in (live, live / "attempt-0", live / "attempt-0" / "trace"):
        folder.chmod(0o555)
    try:
        assert hpcpace("watch", live, "--once")[0] == 0
    finally:
        for folder in (live, live / "attempt-0", live / "attempt-0" / "trace"):
            folder.chmod(0o755)


def test_nothing_in_the_run_is_changed(hpcpace, live: Path) -> None:
    copy = live.with_name("copy")
    shutil.copytree(live, copy)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(copy.rglob("*"))}
    hpcpace("watch", copy, "--once")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(copy.rglob("*"))} == before


def test_an_attempt_that_has_not_begun_cannot_tell(hpcpace, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").new_attempt()
    code, out, _ = hpcpace("watch", tmp_path / "run", "--once")
    assert code == 3 and out.startswith("STARTING")


def test_once_before_the_job_starts_cannot_tell(hpcpace, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        code, out, err = hpcpace("watch", tmp_path / name, "--once")
        assert code == 3 and "the job has not started" in " ".join(out.split()) and not err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none/deeper/run"], "no run directory at"),
        (["file.txt"], "no run directory at"),
        (["none/deeper/run", "--once"], "no run directory at"),
        (["none", "--listen", "nonsense"], "is no address"),
        (["none", "--prometheus", "no/folder/a.prom"], "is no folder"),
        (["none", "--json", "--listen", ":0"], "give one of them"),
        (["none", "--interval", "0"], "--interval"),
        (["none", "--attempt", "-1"], "--attempt"),
        ([], "RUN"),
    ],
)
def test_wrong_input(hpcpace, tmp_path: Path, monkeypatch, arguments: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    code, out, err = hpcpace("watch", *arguments)
    assert code == 2 and says in out + err


def test_once_exports_and_ends(hpcpace, live: Path, tmp_path: Path) -> None:
    code, out, _ = hpcpace("watch", live, "--once", "--prometheus", tmp_path / "a.prom")
    assert (code, out) == (0, "")


def _watching(*arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "hpcpace", "watch", *map(str, arguments)]
    return subprocess.Popen(command, **options)


def test_json_goes_on_line_by_line_until_it_is_ended(live: Path) -> None:
    with _watching(live, "--json", "--interval", "0.1", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        states = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait() == 0
    assert [state["doing"] for state in states] == ["running"] * 3


def test_a_run_that_begins_later_is_found(tmp_path: Path) -> None:
    with _watching(tmp_path / "run", "--json", "--interval", "0.1", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["doing"] == "not started"
        RunDirectory(tmp_path / "run").new_attempt()
        while json.loads(process.stdout.readline())["doing"] != "starting":
            pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 3


def test_a_reader_that_goes_away_is_no_error(live: Path) -> None:
    with _watching(
        live, "--json", "--interval", "0.1", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() in (0, 1)


def test_on_a_terminal_keys_work_and_it_is_left_as_it_was(live: Path) -> None:
    main, terminal = pty.openpty()
    with _watching(
        live, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    ) as process:
        shown = b""
        while b"2 of 2 live" not in shown:
            shown += os.read(main, 65536)
        os.write(main, b"?")
        while b"leave this page" not in shown:
            shown += os.read(main, 65536)
        os.write(main, b"q")
        while b"\x1b[?1049l" not in shown:
            shown += os.read(main, 65536)
        assert process.wait() == 0
    assert re.search(rb"\x1b\[\?25h", shown)  # the cursor is back
    os.close(main)
    os.close(terminal)
