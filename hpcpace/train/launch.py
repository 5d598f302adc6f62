"""Several ranks on this machine without a launcher: the process becomes `mpiexec`, or torchrun where MPI is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpcpace.core.errors import ConfigError, WorldError
from hpcpace.world.mpi_start import load_mpi


def mpiexec_command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `hpcpace ARGUMENTS` on several ranks of this host.

    Raises:
        WorldError: there is no mpiexec.
    """
    beside_python = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise WorldError(
            f"no mpiexec beside {sys.executable} or on PATH, so --ranks {num_ranks} cannot start: "
            "`pip install mpich`, or start the ranks with srun, mpiexec or torchrun"
        )
    # Inside a Slurm allocation MPICH's mpiexec would start its ranks by srun, over all hosts.
    local = ["-launcher", "fork", "-hosts", "localhost"]
    return [mpiexec, *local, "-n", str(num_ranks), sys.executable, "-P", "-m", "hpcpace", *arguments]


def become_mpiexec(num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by mpiexec, so that signals and exit codes are those of the job.

    Raises:
        WorldError: there is no mpiexec.
    """
    _become(mpiexec_command(num_ranks, arguments), environ)


def become_torchrun(num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by torchrun, which needs no MPI. It ends with 1 whatever code a rank ended with."""
    # torchrun would print a warning for what it sets itself.
    threads = {"OMP_NUM_THREADS": str(threads_of_rank(num_ranks))}
    _become(torchrun_command(num_ranks, arguments), {**threads, **environ})


def torchrun_command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `hpcpace ARGUMENTS` on several ranks of this host without MPI."""
    options = ["--standalone", "--nproc-per-node", str(num_ranks), "--no-python"]
    python = [sys.executable, "-P"]
    return [*python, "-m", "torch.distributed.run", *options, *python, "-m", "hpcpace", *arguments]


def lacks_mpi(coordination: str) -> bool:
    """Return whether ranks started here do without MPI: by the setting, or because it or its mpiexec is missing."""
    if coordination != "auto":
        return coordination == "torch"
    try:
        load_mpi({})
        mpiexec_command(1, [])
    except WorldError:
        return True
    return False


def _become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, dict(environ))


def check_compiler(environ: Mapping[str, str]) -> None:
    """Refuse a machine on which torch.compile would fail in the first step.

    Raises:
        ConfigError: there is no C++ compiler, which it needs for CPUs, and on GPUs for the launch of kernels.
    """
    compiler = environ.get("CXX", "g++")
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"--compile needs a C++ compiler, but there is no {compiler}: install one (`apt-get install g++`), name it "
            "with CXX, or drop --compile"
        )


def threads_of_rank(local_size: int) -> int:
    """Return the threads that a rank may use, so that the ranks of a host have a core each where there are enough.

    A launcher that binds ranks to cores has done this already; else the cores are shared out evenly.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, (os.cpu_count() or 1) // local_size))
