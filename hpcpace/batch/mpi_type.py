"""The `srun --mpi` type that matches the MPI library of the ranks, where nobody chose one.

With a type that the library does not speak, each rank would be a world of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_PROBE_TIMEOUT_S = 30.0
# The first words that occur in a library's version decide; each has the types that it speaks, the best one first.
_TYPES = {
    "open mpi": ("pmix",),
    "cray": ("cray_shasta", "pmi2"),
    "mpich": ("pmi2", "cray_shasta"),
    "mvapich": ("pmi2",),
    "intel": ("pmi2",),
}


def mpi_option(environ: Mapping[str, str], python: Sequence[str]) -> tuple[str, str]:
    """Return srun's option for the MPI library of the ranks, and the library; the option is empty if nothing is wrong.

    Args:
        environ: environment of the job.
        python: words that run the Python of the ranks.
    """
    offered = _output(["srun", "--mpi=list"], environ).split()
    if not offered:
        return "", ""
    library = _output([*python, "-P", "-c", _PROBE], environ)
    spoken = spoken_types(library)
    default = environ.get("SLURM_MPI_TYPE") or _default_type(_output(["scontrol", "show", "config"], environ))
    # pmix_v4 is a version of pmix.
    if not spoken or default.partition("_v")[0] in spoken:
        return "", library
    return next((f"--mpi={name}" for name in spoken if name in offered), ""), library


def spoken_types(library: str) -> tuple[str, ...]:
    """Return the types that a library speaks, the best one first; empty for a library that is not known."""
    lowered = library.lower()
    return next((types for word, types in _TYPES.items() if word in lowered), ())


def _default_type(config: str) -> str:
    lines = (line.partition("=") for line in config.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "MpiDefault"), "")


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a command prints to stdout; nothing if it fails."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
