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
from hpcpace.cli import cli, main
from hpcpace.core import pool
from hpcpace.core.errors import NotEnoughMemory
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis import operation_figures

SCENARIO = Scenario(seed=7, num_ranks=16, num_steps=300, fault="slow_rank", size=0.4, target=5)
OWN = os.getpid()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_run(SCENARIO, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(params=["one process", "processes of this machine"])
def num_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Share the work out to two processes, or do it in one."""
    number = 1 if request.param == "one process" else 2
    for module in (pool, operation_figures):
        monkeypatch.setattr(module, "num_threads", lambda: number if pool._forked is None else 1)
    monkeypatch.setattr(operation_figures, "_MIN_SHARED", 0)
    monkeypatch.setattr(operation_figures, "_MIN_ROWS", 1)
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
    monkeypatch.setattr("hpcpace.cli.trace_files.read_trace", _no_memory)
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
        "import hpcpace.cli.options, hpcpace.diagnosis.analyze\n"
        "import hpcpace.report.run_report\n"
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


@pytest.mark.parametrize(("limit_mib", "code"), [(300, 2), (1_000, 2), (1_200, 1), (4_000, 1)])
def test_a_limit_of_the_login_node_leaves_room_or_is_named(run: RunDirectory, limit_mib: int, code: int) -> None:
    result = _limited("", run, limit_mib)
    assert result.returncode == code, result.stderr
    if code == 2:
        assert result.stderr.startswith("hpcpace: not enough memory: the limit of") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_crash_of_a_library_under_a_limit_is_lack_of_memory(run: RunDirectory, number: signal.Signals) -> None:
    result = _limited(f"cli.main = lambda **_: os.kill(os.getpid(), {int(number)})", run, 4_000)
    assert result.returncode == 2
    assert result.stderr == (
        f"hpcpace: not enough memory ({number.name} in a library with a limit of 4000 MiB on addresses): "
        "allow more (ulimit -v, --mem of the job)\n"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_ends_the_command_under_a_limit_is_not_taken_for_memory(
    run: RunDirectory, number: signal.Signals
) -> None:
    result = _limited(f"cli.main = lambda **_: os.kill(os.getpid(), {int(number)})", run, 4_000)
    assert result.returncode == -number and not result.stderr


def test_what_a_library_leaves_damaged_is_not_freed(run: RunDirectory) -> None:
    """After the line on memory the process ends at once: glibc aborts on what HDF5 frees twice."""
    fault = (
        "import atexit\natexit.register(os.kill, os.getpid(), 6)\n"
        "def fault(**_): raise MemoryError('none left')\ncli.main = fault"
    )
    result = _limited(fault, run, 4_000)
    assert result.returncode == 2
    assert result.stderr == "hpcpace: not enough memory (none left): allow more (ulimit -v, --mem of the job)\n"


def _limited(change: str, run: RunDirectory, limit_mib: int) -> subprocess.CompletedProcess[str]:
    """Report a run as a process does that starts under a limit on addresses; `change` is Python run before."""
    program = (
        "import os, resource, sys\nfrom hpcpace.cli import cli, main\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit_mib << 20}, {limit_mib << 20}))\n"
        f"{change}\nsys.argv = ['hpcpace', 'report', {str(run.path)!r}]\nmain()\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
