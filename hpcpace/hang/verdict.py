"""The verdict on a job that hangs, computed in a process of its own from what its ranks have written.

    python -m hpcpace.hang.verdict RUN/attempt-0

It prints one object of JSON: `headline`, `why`, `advice`; `headline` is empty where no rank waits for another. A file
system that does not answer delays a rank that asks for it no longer than its timeout. The verdict may end the job, so
it rests on files of the job's own user alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.hang.words import HangWords

_MOST_TEXT = 2000


def ask_verdict(attempt: Attempt, timeout_s: float) -> HangWords | None:
    """Return what a child process finds in the records of an attempt; None if no rank waits for another.

    Raises:
        RuntimeError: it found nothing, for a reason of its own, or not in time.
    """
    command = [sys.executable, "-P", "-m", "hpcpace.hang.verdict", str(attempt.path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:_MOST_TEXT])
        content = json.loads(done.stdout)
        words = HangWords(
            headline=str(content["headline"])[:_MOST_TEXT],
            why=tuple(str(line)[:_MOST_TEXT] for line in content["why"]),
            advice=str(content["advice"])[:_MOST_TEXT],
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the records could not be read within {timeout_s:g} s") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"the records cannot be read: {error or type(error).__name__}") from error
    return words if words.headline else None


def find_verdict(attempt: Attempt) -> HangWords | None:
    """Return who holds up whom in an attempt, in words; None if no rank waits for another.

    Raises:
        TraceError: no trace can be read.
    """
    from hpcpace.hang.from_traces import job_view
    from hpcpace.hang.rules import find_hang
    from hpcpace.hang.words import describe

    job = job_view(attempt)
    hang = find_hang(job)
    return None if hang is None else describe(hang, job)


def main() -> None:
    """Print the verdict on the attempt whose folder is the only argument."""
    path = Path(sys.argv[1])
    with Folder.open(path.parent) as run:
        run.owner = os.geteuid()
        words = find_verdict(RunDirectory(path.parent, run).attempt(Attempt(path).number))
    content: dict[str, Any] = asdict(words or HangWords(headline="", why=(), advice=""))
    print(json.dumps(content))


if __name__ == "__main__":
    main()
