"""Runs `hpcpace report` with a fault in process 1: `report_program.py CASE RUN`."""

from __future__ import annotations

import os
import signal
import sys

from hpcpace.cli import main
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.diagnosis import analyze, operation_figures

case, run = sys.argv[1:]


def fail(*_args: object, **_options: object) -> None:
    if case.startswith("memory"):
        raise MemoryError
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("division by zero")


if rank_info(process_environ()).rank == 1:
    if case == "reads_less":
        read = analyze.read_attempt

        def read_less(*args: object, **options: object) -> object:
            found = read(*args, **options)
            del found.traces[-1]
            return found

        analyze.read_attempt = read_less
    elif case == "memory_between":  # what the processes do together
        analyze._credible_run = fail
    else:
        operation_figures.rank_totals = fail
sys.argv = ["hpcpace", "report", run]
main()
