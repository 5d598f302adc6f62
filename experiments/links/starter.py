"""Starts training jobs on one host of a lab: torch is imported once, and each rank is a fork of this process.

Importing torch takes a busy machine of two cores longer than the short jobs of the experiment themselves. Commands come
as lines of JSON on standard input; a line of JSON goes back when the rank has ended. Nothing is shared between jobs but
the imported modules: sockets, threads and sessions are made after the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

# What a forked rank needs is loaded before it is forked.
for _module in ("torch.distributed", "hpcpace.train.models"):
    importlib.import_module(_module)


def main() -> None:
    """Answer commands until standard input ends."""
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_rank(command)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)


def _become_rank(command: dict[str, Any]) -> None:
    """Run the command line of a rank with its environment and log, and end this process."""
    status = 1
    try:
        log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(command["environ"])
        os.chdir(command["folder"])
        sys.argv = ["hpcpace", *command["arguments"]]
        from hpcpace.cli import main as run_command

        run_command()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # the boundary: the starter lives on, and the log has the reason
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
