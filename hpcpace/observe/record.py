"""What run.json says about a run: settings, versions, hosts, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hpcpace import __version__
from hpcpace.config import Config

_PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "mpich")
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("SLURM_JOB_", "SLURM_STEP_", "NCCL_", "GLOO_", "HPCPACE_")


def run_record(
    *,
    name: str,
    config: Config,
    environ: Mapping[str, str],
    hosts: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of run.json.

    Args:
        hosts: one entry a rank: rank, host, node, pid.
        facts: what the caller knows beyond that, such as model, data, mesh and launcher.
    """
    return {
        "schema": "hpcpace-run/1",
        "name": name,
        "created_unix_ns": time.time_ns(),
        "command": sys.argv,
        "config": config.to_json(),
        "ranks": list(hosts),
        "versions": {"hpcpace": __version__, "python": platform.python_version(), **_versions()},
        "kernel": platform.release(),
        "git_commit": _git_commit(),
        "environment": {k: v for k, v in sorted(environ.items()) if k in _VARIABLES or k.startswith(_PREFIXES)},
        **facts,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:  # loading it here would start MPI
        found["mpi"] = mpi.Get_library_version().splitlines()[0].rstrip("\0")
    return found


def _git_commit() -> str:
    """Return the commit of the working directory, which is usually that of the training script; empty without one."""
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
