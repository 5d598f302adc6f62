"""A process that takes a core away at regular times, and what the probe says about that core.

sudo .venv/bin/python -m experiments.probe_lab.thief

Both have real-time priority, the thief a higher one: so nothing else of the machine disturbs the core, but for the
twentieth of each second that Linux keeps for other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.pages import row, table

_CASES = ((0.01, 0.01), (0.01, 0.1), (0.05, 0.01), (0.05, 0.1))
_LENGTH_S = 5.0
_PRIORITY = 50
_THIEF = """
import os, sys, time
cpu, share, period_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {cpu})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(int(sys.argv[4])))
next_s = time.monotonic()
while True:
    next_s += period_s
    time.sleep(max(next_s - time.monotonic(), 0))
    end_s = time.monotonic() + share * period_s
    while time.monotonic() < end_s:
        pass
"""


def main() -> None:
    """Run all cases and print a row of a table for each."""
    cpu = max(os.sched_getaffinity(0))
    print(table(("share", "period", "taken", "share found", "period found", "lost in all", "load"), []))
    for share, period_s in _CASES:
        with _thief(cpu, share, period_s) as pid:
            quanta = ["-P", "-m", "hpcpace.probe.quanta", str(cpu), "0", str(_LENGTH_S)]
            words = ["chrt", "--fifo", str(_PRIORITY // 2), sys.executable, *quanta]
            before_s, begin_s = _processor_time_s(pid), time.monotonic()
            found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
            taken = (_processor_time_s(pid) - before_s) / (time.monotonic() - begin_s)
        period = "none" if found["period_ns"] is None else f"{found['period_ns'] / 1e6:.2f} ms"
        of_period = "-" if found["period_share"] is None else f"{100 * found['period_share']:.2f} %"
        cells = [f"{100 * share:.0f} %", f"{1e3 * period_s:.0f} ms", f"{100 * taken:.2f} %", of_period, period]
        cells += [f"{100 * found['share']:.1f} %", f"{os.getloadavg()[0]:.0f}"]
        print(row(cells), flush=True)


@contextlib.contextmanager
def _thief(cpu: int, share: float, period_s: float) -> Iterator[int]:
    """Run a thief, and yield its process id."""
    words = [sys.executable, "-c", _THIEF, str(cpu), str(share), str(period_s), str(_PRIORITY)]
    with subprocess.Popen(words) as thief:
        time.sleep(0.5)
        try:
            yield thief.pid
        finally:
            thief.kill()


def _processor_time_s(pid: int) -> float:
    """Return what a process has had of cores, which is more than it wants: it has to wake up and to fall asleep."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
