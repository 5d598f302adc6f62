"""A report for which there is not enough memory says so in one line, with what to do, and ends with exit code 2."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace import parallel
from hpcpace.cli import cli, main
from hpcpace.diagnosis import operation_figures
from hpcpace.errors import NotEnoughMemory
from hpcpace.rundir import RunDirectory

SCENARIO = Scenario(seed=7, num_ranks=16, num_steps=300, fault="slow_rank", size=0.4, target=5)
OWN = os.getpid()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_run(SCENARIO, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(params=["one process", "processes of this machine"])
def num_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Share the work out to two processes, or do it in one."""
    number = 1 if request.param == "one process" else 2
    for module in (parallel, operation_figures):
        monkeypatch.setattr(module, "num_threads", lambda: number if parallel._forked is None else 1)
    monkeypatch.setattr(operation_figures, "_LEAST_SHARED", 0)
    monkeypatch.setattr(operation_figures, "_LEAST_ROWS", 1)
    monkeypatch.setitem(operation_figures.measure_operations.__kwdefaults__, "max_rows", 2_000)
    return number


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError("Unable to allocate 1.00 TiB")


def _kill_worker(*_: object) -> None:
    assert os.getpid() != OWN
    os.kill(os.getpid(), signal.SIGKILL)


def _report(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, fault: Callable[..., None], *options: str) -> str:
    monkeypatch.setattr(operation_figures, "rank_totals", fault)
    result = CliRunner().invoke(cli, ["report", str(run.path), *options])
    assert isinstance(result.exception, NotEnoughMemory) and result.exception.exit_code == 2
    return str(result.exception)


def test_memory_that_runs_out_is_one_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    said = _report(monkeypatch, run, _no_memory)
    assert "\n" not in said and f"not enough memory to report {run.path}" in said
    assert "Unable to allocate 1.00 TiB" in said and "`--steps A:B`" in said and "srun -N M -n N hpcpace report" in said


def test_the_steps_that_were_asked_for_are_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "steps 10:200" in _report(monkeypatch, run, _no_memory, "--steps", "10:200")


@pytest.mark.parametrize("num_processes", ["processes of this machine"], indirect=True)
def test_a_worker_that_is_killed_is_one_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    said = _report(monkeypatch, run, _kill_worker)
    assert f"one of {num_processes} processes that shared the work ended without a result" in said
    assert "`--steps A:B`" in said


def test_any_command_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    monkeypatch.setattr("hpcpace.cli.dump.read_trace", _no_memory)
    monkeypatch.setattr(sys, "argv", ["hpcpace", "dump", str(run.attempt(0).trace_file(0))])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "hpcpace: not enough memory (Unable to allocate 1.00 TiB): allow more (ulimit -v, --mem of the job)\n"
    )


@pytest.mark.parametrize("room_mib", [1, 4, 16, 64])
def test_a_limit_on_addresses_ends_in_a_report_or_in_one_line(run: RunDirectory, tmp_path: Path, room_mib: int) -> None:
    """The limit is set when everything is imported, so that it meets the work."""
    program = (
        "import resource, sys\nfrom pathlib import Path\nimport hpcpace.cli.report\nfrom hpcpace.cli import main\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        f"limit = pages * {resource.getpagesize()} + {room_mib << 20}\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"sys.argv = ['hpcpace', 'report', {str(run.path)!r}]\nmain()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode in (1, 2)
    if result.returncode == 2:
        assert "memory" in result.stderr and result.stderr.count("hpcpace: ") == 1
