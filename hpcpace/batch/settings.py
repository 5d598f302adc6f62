"""The environment variables that a batch job reads, in addition to the settings of hpcpace.core.config."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpcpace.batch.launch import whole_number
from hpcpace.core.errors import UsageError
from hpcpace.core.text import shown

AUDITS = ("off", "warn", "strict")
BINDS = ("off", "auto")
_SECONDS = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How a batch job runs; docs/slurm.md lists the variables.

    Attributes:
        audit: `warn`, `strict` or `off`, from HPCPACE_AUDIT.
        bind: `auto` binds ranks as the audit proposes, from HPCPACE_BIND.
        mpi: srun's `--mpi`, from HPCPACE_MPI; empty: chosen to match the MPI library.
        srun_args: further options of srun, from HPCPACE_SRUN_ARGS.
        python: words that run a Python with hpcpace, from HPCPACE_PYTHON; empty: this one.
        num_ranks: ranks without Slurm, from HPCPACE_RANKS.
        run_dir: folder of the run, from HPCPACE_RUN_DIR; empty: runs/JOB-NAME.
        requeue_after_s: seconds that a job must have trained to be requeued, from HPCPACE_REQUEUE_AFTER_S.
        start_timeout_s: seconds that ranks may take to start, from HPCPACE_WORLD_START_TIMEOUT_S.
    """

    audit: str
    bind: str
    mpi: str
    srun_args: tuple[str, ...]
    python: tuple[str, ...]
    num_ranks: int
    run_dir: str
    requeue_after_s: int
    start_timeout_s: float

    @property
    def program(self) -> tuple[str, ...]:
        """The words that run hpcpace; `-P` keeps Python from looking for modules in the working folder."""
        if self.python:
            return (*self.python, "-P", "-m", "hpcpace")
        return (sys.executable, "-P", "-m", "hpcpace") if sys.argv[0].endswith(".py") else (sys.argv[0],)


def read_settings(environ: Mapping[str, str]) -> BatchSettings:
    """Return the settings of a batch job.

    Raises:
        UsageError: a variable has a value that it cannot have.
    """
    start_timeout_s = environ.get("HPCPACE_WORLD_START_TIMEOUT_S") or "120"
    if not _SECONDS.fullmatch(start_timeout_s):
        raise UsageError(f"HPCPACE_WORLD_START_TIMEOUT_S is {shown(start_timeout_s)}: it must be a number of seconds")
    settings = BatchSettings(
        audit=_choice(environ, "HPCPACE_AUDIT", AUDITS, "warn"),
        bind=_choice(environ, "HPCPACE_BIND", BINDS, "off"),
        mpi=environ.get("HPCPACE_MPI", ""),
        srun_args=_words(environ, "HPCPACE_SRUN_ARGS"),
        python=_words(environ, "HPCPACE_PYTHON"),
        num_ranks=whole_number(environ, "HPCPACE_RANKS", 4),
        run_dir=environ.get("HPCPACE_RUN_DIR", ""),
        requeue_after_s=whole_number(environ, "HPCPACE_REQUEUE_AFTER_S", 300),
        start_timeout_s=float(start_timeout_s),
    )
    if settings.bind == "auto" and settings.audit == "off":
        raise UsageError("HPCPACE_BIND=auto takes its masks from the audit, but HPCPACE_AUDIT is off: set it to warn")
    return settings


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    value = environ.get(name) or default
    if value not in choices:
        raise UsageError(f"{name} is {shown(value)}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the words of a variable; quotes keep blanks, as in a shell, and nothing is run or expanded."""
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise UsageError(f"{name} has a quote that is not closed ({error}): close it, or leave it out") from None
