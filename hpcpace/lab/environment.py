"""The environment of a lab's processes, and what a machine needs to run a lab."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from hpcpace.core.environment import process_environ
from hpcpace.core.errors import UsageError
from hpcpace.lab.files import LabFiles
from hpcpace.lab.plan import LabPlan, read_config

_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "setsid": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
}
"""The Debian package of each program that the lab calls."""

NAME_VARIABLE = "HPCPACE_LAB_NAME"
"""Names the lab that a command runs in."""

EMULATION_VARIABLE = "HPCPACE_LAB_EMULATION"
"""Says how computation is emulated; recorded with each run and shown in its report."""

# Set if the lab runs inside another cluster's job; none of these variables may reach the lab's own Slurm.
_FOREIGN = re.compile(r"SLURM|SRUN|SBATCH|SALLOC|PMI")


def lab_environ(files: LabFiles) -> dict[str, str]:
    """Return the environment for a lab's processes: the current one, the lab's Slurm, this Python first on PATH."""
    environ = {key: value for key, value in process_environ().items() if not _FOREIGN.match(key)}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), search_path()])
    environ["SLURM_CONF"] = str(files.slurm_conf)
    environ[NAME_VARIABLE] = files.name
    environ[EMULATION_VARIABLE] = LabPlan(read_config(files)).emulation
    return environ


def search_path() -> str:
    """Return PATH plus the folders of system daemons, which many users do not have on it."""
    return os.pathsep.join([process_environ().get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def check_requirements() -> None:
    """Refuse a machine that cannot run the lab.

    Raises:
        UsageError: not root, or programs are missing; the message names their packages.
    """
    if os.geteuid() != 0:
        raise UsageError(
            f"the lab needs root for namespaces and mounts, but this is user {os.geteuid()}: run it with sudo"
        )
    check_programs(_PACKAGES, also=["slurm-wlm-basic-plugins"])


def check_programs(packages: dict[str, str], *, also: list[str] | None = None) -> None:
    """Check that programs are installed; `packages` has the Debian package of each.

    Raises:
        UsageError: some are missing; the message has the line that installs them and the packages in `also`.
    """
    missing = [program for program in packages if shutil.which(program, path=search_path()) is None]
    if missing:
        wanted = " ".join(sorted({packages[program] for program in missing} | set(also or [])))
        raise UsageError(f"the lab needs {', '.join(missing)}: `apt-get install --no-install-recommends {wanted}`")
