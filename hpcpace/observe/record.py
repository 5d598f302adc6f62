"""The content of run.json: settings, versions, hosts, commit.

Of the environment only the variables below are kept, and of nothing a secret (`hpcpace.core.redaction`).
docs/recorded-data.md lists every field.
"""

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
from hpcpace.config_values import setting_variables
from hpcpace.core.redaction import Redaction

_PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "mpich")
KEPT_VARIABLES = frozenset(
    (
        *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HPCPACE_LAB_NAME", "HPCPACE_LAB_EMULATION"),
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
        *("SLURM_JOB_CPUS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_RESTART_COUNT"),
    )
)
"""Environment variables that run.json keeps, along with those of hpcpace's own settings."""

KEPT_PREFIXES = ("NCCL_", "GLOO_")
"""Beginnings of further ones."""


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
    record = {
        "schema": "hpcpace-run/1",
        "name": name,
        "created_unix_ns": time.time_ns(),
        "command": sys.argv,
        "config": config.to_json(),
        "ranks": list(hosts),
        "versions": {"hpcpace": __version__, "python": platform.python_version(), **_versions()},
        "kernel": platform.release(),
        "git_commit": _git_commit(),
        "environment": _kept(environ),
        **facts,
    }
    # A value whose name marks it as a secret here is removed everywhere else as well.
    redacted: dict[str, Any] = Redaction.of(environ, sys.argv).content(record)
    return redacted


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    names = KEPT_VARIABLES | setting_variables()
    return {name: environ[name] for name in sorted(environ) if name in names or name.startswith(KEPT_PREFIXES)}


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
