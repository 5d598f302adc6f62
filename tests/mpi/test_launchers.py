"""Whatever starts the ranks of a script, they leave one run with all of them, and the last line says so."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.figures.overview import attempt_rows
from hpcpace.diagnosis.measure import Selection
from hpcpace.report.sections.phases import attempts_differ
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.reader import RankTrace, read_trace

Run = Callable[..., CompletedProcess[str]]
SCRIPT = Path(__file__).with_name("launched_script.py")
OWN_SCRIPT = Path(__file__).with_name("own_script.py")
TRACE = ("-m", "hpcpace", "trace")


@pytest.fixture
def trace(python: Run, tmp_path: Path) -> Run:
    """Run `hpcpace trace` with a program, into the run directory `run`."""
    return lambda *program, **variables: python(*TRACE, "--run-dir", tmp_path / "run", "--", *program, **variables)


def _traces(run: Path, attempt: int = 0) -> list[RankTrace]:
    return [read_trace(path) for path in open_run(run).attempt(attempt).trace_files().values()]


def _ranks_and_steps(run: Path, attempt: int = 0) -> list[tuple[int, int, int]]:
    traces = _traces(run, attempt)
    return [(trace.header.rank, trace.header.world_size, len(trace.tables["steps"])) for trace in traces]


def _last_lines(result: CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("hpcpace: ")]


def _losses(result: CompletedProcess[str]) -> list[str]:
    return sorted(line for line in result.stdout.splitlines() if line.startswith("loss"))


@pytest.mark.parametrize("way", only_nightly(["spawn"], ["fork", "relaunch"]))
def test_ranks_that_a_script_starts_by_itself_are_one_run(trace: Run, python: Run, tmp_path: Path, way: str) -> None:
    result = trace(SCRIPT, way)
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 4), (1, 2, 4)]
    assert len(open_run(tmp_path / "run").attempts()) == 1
    assert all(trace.closed_cleanly for trace in _traces(tmp_path / "run"))
    (line,) = _last_lines(result)
    assert line.startswith("hpcpace: recorded 2 ranks, 4 steps (") and f"hpcpace report {tmp_path / 'run'}" in line
    assert _losses(result) == _losses(python(SCRIPT, way))


@pytest.mark.nightly
def test_a_process_group_that_a_mesh_makes_is_recorded(torchrun: Run, tmp_path: Path) -> None:
    result = torchrun(2, *TRACE, "--run-dir", tmp_path / "run", "--", SCRIPT, "mesh_only")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 4), (1, 2, 4)]
    assert len(_last_lines(result)) == 1


@pytest.mark.nightly
def test_a_session_of_the_script_names_the_steps_of_the_command(
    torchrun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = torchrun(2, *TRACE, "--run-dir", tmp_path / "run", "--", SCRIPT, "own_session")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 2), (1, 2, 2)], "of two updates each"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert result.stderr.count("the session in the script names its steps") == 1 and "Overriding" not in result.stderr


@pytest.mark.nightly
def test_sessions_of_ranks_without_a_launcher_are_one_run(python: Run, tmp_path: Path) -> None:
    result = python(SCRIPT, "own_world", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 2), (1, 2, 2)]
    assert [trace.header.local_rank for trace in _traces(tmp_path / "run")] == [0, 1]
    assert result.stderr == ""


@pytest.mark.nightly
def test_torchrun_below_the_command_leaves_what_it_leaves_above_it(trace: Run, torchrun: Run, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    result = trace(*launcher, SCRIPT, "mesh_only")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 4), (1, 2, 4)]
    assert len(_last_lines(result)) == 1
    assert _losses(result) == _losses(torchrun(2, SCRIPT, "mesh_only"))


@pytest.mark.nightly
def test_a_second_process_group_is_another_attempt_of_the_run(torchrun: Run, tmp_path: Path) -> None:
    result = torchrun(2, *TRACE, "--run-dir", tmp_path / "run", "--", SCRIPT, "twice")
    assert result.returncode == 0, result.stderr
    assert [_ranks_and_steps(tmp_path / "run", attempt) for attempt in (0, 1)] == [
        [(0, 2, 2), (1, 2, 2)],
        [(0, 2, 3), (1, 2, 3)],
    ]


@pytest.mark.parametrize("is_below", only_nightly([True], [False]))
def test_an_elastic_restart_is_another_attempt_of_the_run(
    python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_below: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", 1, "--nproc-per-node", 2)
    program = (SCRIPT, "fail_once")
    command = (*TRACE, "--", *launcher, *program) if is_below else (*launcher, *TRACE, "--", *program)
    # Else gloo now and then takes addresses of the first start, which torchrun keeps in its store, for those of now.
    result = python(*command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert [len(_ranks_and_steps(run, attempt)) for attempt in (0, 1)] == [2, 2]
    assert _ranks_and_steps(run, 1) == [(0, 2, 4), (1, 2, 4)]
    assert "RuntimeError: the first start fails" in result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("is_below", only_nightly([False], [True]))
def test_a_start_with_fewer_ranks_is_another_attempt_of_the_run(python: Run, tmp_path: Path, is_below: bool) -> None:
    # As after the loss of a node: the same command on the ranks that are left.
    run, launcher = tmp_path / "run", f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node"
    traced = f"-m hpcpace trace --run-dir {run} -- "
    script = "".join(f"{launcher} {size} {'' if is_below else traced}{SCRIPT} smaller\n" for size in (3, 2))
    (tmp_path / "run.sh").write_text(script)
    shell = ("-c", f"import os; os.execvp('bash', ['bash', '{tmp_path}/run.sh'])")
    result = python(*(traced.split() if is_below else ()), *shell)
    assert result.returncode == 0, result.stderr
    assert [_ranks_and_steps(run, attempt) for attempt in (0, 1)] == [
        [(0, 3, 4), (1, 3, 4), (2, 3, 4)],
        [(0, 2, 4), (1, 2, 4)],
    ]
    last = open_run(run).attempt(1)
    rows = attempt_rows(open_run(run), last, read_attempt(last, most_rows=0).traces, Selection())
    assert [(row.attempt, row.world_size) for row in rows] == [(0, 3), (1, 2)]
    assert "2 ranks instead of 3" in attempts_differ(rows, 1)


@pytest.mark.nightly
def test_the_launcher_of_older_scripts_names_the_local_rank(python: Run, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.launch", "--standalone", "--nproc-per-node", "2", "-m", "hpcpace", "trace")
    script = tmp_path / "train.py"
    check = "import runpy, sys\nassert sys.argv.pop(1) in ('--local-rank=0', '--local-rank=1')\n"
    script.write_text(f"{check}runpy.run_path({str(OWN_SCRIPT)!r}, run_name='__main__')\n")
    result = python(*launch, "--run-dir", tmp_path / "run", "--", script, "3")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 2, 3), (1, 2, 3)]


def test_a_script_in_a_shell_script_is_followed(trace: Run, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{sys.executable} {SCRIPT} train\nexit 7\n")
    result = trace("bash", tmp_path / "run.sh")
    assert result.returncode == 7
    assert _ranks_and_steps(tmp_path / "run") == [(0, 1, 4)]
    assert len(_last_lines(result)) == 1


def test_a_module_is_run_as_python_does_it(python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    code = "import json, sys\nprint(json.dumps([sys.path, sys.argv, __spec__.name, sys.modules['__main__'].__name__]))"
    (tmp_path / "mine" / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    plain = python("-m", "mine.train", "--epochs", 3)
    traced = python(*TRACE, "--", "-m", "mine.train", "--epochs", 3)
    assert (traced.returncode, traced.stdout) == (0, plain.stdout), traced.stderr
    assert '"mine.train", "__main__"' in plain.stdout


def test_what_does_not_train_is_not_recorded_and_the_last_line_says_why(trace: Run, tmp_path: Path) -> None:
    result = trace(SCRIPT, "only_launch")
    assert (result.returncode, result.stdout) == (0, "no rank\n"), result.stderr
    why = "no process group was made and no optimizer stepped"
    assert result.stderr == f"hpcpace: nothing was recorded: {why}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("way", "code"), only_nightly([("exits", 3)], [("leaves_at_once", 5)]))
def test_the_exit_code_is_that_of_the_script(trace: Run, tmp_path: Path, way: str, code: int) -> None:
    result = trace(SCRIPT, way)
    assert result.returncode == code
    assert _ranks_and_steps(tmp_path / "run") == [(0, 1, 4)]
    assert result.stderr.startswith("hpcpace: recorded 1 rank, 4 steps (") and result.stderr.count("\n") == 1


def test_a_traceback_is_that_of_the_script_alone(trace: Run, python: Run) -> None:
    traced = trace(OWN_SCRIPT, 2, "--fail")
    plain = python(OWN_SCRIPT, 2, "--fail")
    assert traced.returncode == plain.returncode == 1
    first, _, rest = traced.stderr.partition("\n")
    assert (first.startswith("hpcpace: recorded 1 rank"), rest) == (True, plain.stderr)


def test_what_a_rank_starts_is_left_alone(trace: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    given = {"", *(name for name in os.environ if "HPCPACE_" in name)}  # what the tests themselves set
    code = f"import os; print([n for n in {{*os.environ}} - {given} if 'HPCPACE_' in n], os.environ['PYTHONPATH'])"
    script.write_text(
        "import subprocess, sys, torch\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        f"subprocess.run([sys.executable, '-c', {code!r}])\n"
    )
    assert trace(script, PYTHONPATH=str(tmp_path)).stdout == f"[] {tmp_path}\n"


@pytest.mark.nightly
def test_another_sitecustomize_is_run_as_well(trace: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the site')")
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.modules['sitecustomize'].__file__)")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    assert trace(script, PYTHONPATH=path).stdout == f"of the site\nof the site\n{tmp_path / 'sitecustomize.py'}\n"


def test_a_python_without_hpcpace_goes_on_as_ever(trace: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    (tmp_path / "hpcpace.py").write_text("raise RuntimeError('not this one')")
    code = f"import os, subprocess, sys; subprocess.run([sys.executable, '-S', {str(script)!r}])"
    result = trace("-c", code)
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert re.fullmatch(r"hpcpace: nothing was recorded: .*\n", result.stderr)


@pytest.mark.parametrize("name", only_nightly(["SIGTERM"], ["SIGINT", "SIGKILL"]))
def test_a_signal_ends_the_script_as_it_does_without_hpcpace(
    trace: Run, python: Run, tmp_path: Path, name: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch\ntorch.ones(1, requires_grad=True).sum().backward()\n"
        # A shell that runs the tests in its background has them ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"os.kill(os.getpid(), signal.{name})\nsignal.pause()\n"
    )
    traced, plain = trace(script), python(script)
    assert traced.returncode == plain.returncode < 0
    assert sum(line.startswith("hpcpace: recorded 1 rank, ") for line in traced.stderr.splitlines()) == 1


@pytest.mark.nightly
def test_two_commands_of_a_shell_script_are_two_runs(trace: Run, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{sys.executable} {SCRIPT} train\n{sys.executable} {OWN_SCRIPT} 3\n")
    result = trace("bash", tmp_path / "run.sh")
    assert result.returncode == 0, result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 1, 4)]
    assert _ranks_and_steps(tmp_path / "run-2") == [(0, 1, 3)]


@pytest.mark.nightly
def test_ranks_of_mpi_that_torch_does_not_connect_are_not_worlds_of_one(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, *TRACE, "--run-dir", tmp_path / "run", "--", SCRIPT, "train")
    assert result.returncode == 0
    assert result.stderr == (
        "hpcpace: nothing was recorded: 2 ranks train, and torch connects none of them to another\n"
    )


@pytest.mark.nightly
def test_steps_without_a_backward_pass_are_recorded(trace: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nweight = torch.nn.Parameter(torch.ones(1))\nweight.grad = torch.ones(1)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.25)\nfor _ in range(4):\n    optimizer.step()\n"
        "print(weight.item())\n"
    )
    result = trace(script)
    assert (result.returncode, result.stdout) == (0, "0.0\n"), result.stderr
    assert _ranks_and_steps(tmp_path / "run") == [(0, 1, 4)]


def test_the_summary_of_torchrun_has_the_traceback_of_the_script(torchrun: Run, python: Run, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\n\n\ndef train():\n    raise RuntimeError('no more data, password=hunter2')\n\n\ntrain()\n"
    )
    for is_recorded in (False, True):
        if is_recorded:
            script.write_text(
                f"from torch.distributed.elastic.multiprocessing.errors import record\n"
                f"{script.read_text().replace('def', '@record' + chr(10) + 'def', 1)}"
            )
        result = torchrun(1, *TRACE, "--run-dir", tmp_path / "run", "--", script)
        assert result.returncode == 1
        summary = result.stderr[result.stderr.index("hpcpace FAILED") :]
        assert summary.count(f'File "{script}", line') == 2 - is_recorded
        assert "RuntimeError: no more data" in summary and "To enable traceback" not in summary
        # torch's own `record` writes what the script says.
        assert is_recorded or "RuntimeError: no more data, password=hunter2" not in summary
    below = python(*TRACE, "--", "-m", "torch.distributed.run", "--standalone", script)
    assert below.returncode == 1 and "mine.py FAILED" in below.stderr
