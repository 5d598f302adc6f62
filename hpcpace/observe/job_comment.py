"""One line at the end of the comment of a Slurm job, which `sacct -o comment` and `squeue -o %k` show."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

_TIMEOUT_S = 5.0
# Slurm keeps comments in its database, where they may have 64 KiB; users read them in a column.
_MOST_COMMENT = 1000

Run = Callable[[list[str]], str]


def add_to_comment(job_id: str, line: str, *, run: Run | None = None) -> str:
    """Add a line to the comment of a job, behind what is there; return why that failed, empty if it did not.

    Args:
        job_id: of Slurm.
        line: without line breaks.
        run: runs a command and returns its output; raises what subprocess raises.
    """
    run = run or _run
    try:
        before = _comment(run(["scontrol", "show", "job", job_id]))
        if line in before:
            return ""
        if len(before) + len(line) > _MOST_COMMENT:
            return f"the comment of job {job_id} has {len(before)} characters already"
        run(["scontrol", "update", f"JobId={job_id}", f"Comment={f'{before}; ' if before else ''}{line}"])
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error).strip().splitlines()[-1]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def _comment(shown: str) -> str:
    """Return the comment in what scontrol shows of a job; empty without one."""
    found = re.search(r"^\s*Comment=(.*?)\s*$", shown, re.MULTILINE)
    return "" if found is None or found[1] == "(null)" else found[1]


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
    ).stdout
