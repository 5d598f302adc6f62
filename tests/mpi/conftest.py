"""Start of programs on several ranks, as children of pytest with a timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
Run = Callable[..., subprocess.CompletedProcess[str]]
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "SLURM_",
    "PMI",
    "MPI_",
    "OMPI_",
    "GLOO_",
    "NCCL_",
    "HYDI",
)


HANG_S = 250.0
"""A job that takes longer hangs: with much other work on a machine, the start of torch alone may take half a minute."""


def _run(
    command: list[str], *, timeout_s: float = HANG_S, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    environ |= {"OMP_NUM_THREADS": "1", **variables}
    # A session of its own, so that a timeout ends the launcher and all of its ranks.
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=cwd, start_new_session=True
    )
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        stdout, stderr = child.communicate()
        pytest.fail(f"{command} did not end within {timeout_s} s:\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of several ranks are slow: each starts Python and torch that many times."""
    for item in items:
        if item.path.is_relative_to(_FOLDER) and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def python() -> Run:
    """Run a Python program by itself."""
    return lambda *args, **options: _run([sys.executable, *map(str, args)], **options)


@pytest.fixture(scope="session")
def mpiexec() -> Run:
    """Run a Python program on `n` ranks of MPI."""
    launcher = str(Path(sys.executable).with_name("mpiexec"))
    return lambda n, *args, **options: _run([launcher, "-n", str(n), sys.executable, *map(str, args)], **options)


@pytest.fixture(scope="session")
def torchrun() -> Run:
    """Run a Python program on `n` ranks of torchrun."""
    options_of_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return lambda n, *args, **options: _run([sys.executable, *options_of_torchrun, str(n), *map(str, args)], **options)
