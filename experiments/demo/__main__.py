"""Runs `make demo` again and again, with and without other work on the machine, and prints what its reports say.

python -m experiments.demo --runs 20 --load 2

Every other run has `--load` processes beside it that keep a core busy each. What else is on the machine shows in the
load average.

Options:
  --runs N       run the demo this often [20]
  --load N       processes beside every other run [2]
  --folder PATH  [runs/demo-again]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments import pages
from experiments.jobs import busy, hpcpace
from experiments.options import command_line

_BUSY = "while True: sum(range(10_000))"
_COMPILE = """import json, pathlib
while True:
    for path in pathlib.Path(json.__path__[0]).parent.glob("*.py"):
        compile(path.read_bytes(), path, "exec")
"""
_HEALTHY, _FINDING = 0, 1


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """What the report of one run of the demo said.

    Attributes:
        name: clean or slow-rank-2.
        beside: what was started beside it.
        load: the machine's load average over the minute in which it ended.
        duration_s: of both runs of the demo together.
        exit_code: of `hpcpace report`.
        mode: of the verdict.
        first: whom it names first, like `rank 2`; empty for nobody.
        share: of the step time that the first finding costs.
        also: what else it says.
    """

    name: str
    beside: str
    load: float
    duration_s: float
    exit_code: int
    mode: str
    first: str
    share: float
    also: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether the clean run is healthy, and the slow one names rank 2 first."""
        if self.name == "clean":
            return self.exit_code == _HEALTHY and self.mode == "healthy"
        return self.exit_code == _FINDING and self.mode == "persistent straggler" and self.first == "rank 2"


def run_demo(folder: Path, beside: str) -> list[DemoRun]:
    """Run the demo once and return what both reports say.

    Raises:
        CalledProcessError: it failed.
    """
    begin = time.monotonic()
    command = ["make", "--silent", "demo", f"DEMO={folder}"]
    subprocess.run(command, cwd=pages.ROOT, check=True, capture_output=True, timeout=1200)
    duration_s = time.monotonic() - begin
    return [_reported(folder / name, beside, duration_s) for name in ("clean", "slow-rank-2")]


def _reported(run: Path, beside: str, duration_s: float) -> DemoRun:
    report = hpcpace("report", run, timeout_s=600)
    verdict = json.loads((run / "summary.json").read_text())["verdict"]
    culprits = verdict["culprits"]
    return DemoRun(
        name=run.name,
        beside=beside,
        load=os.getloadavg()[0],
        duration_s=duration_s,
        exit_code=report.returncode,
        mode=verdict["mode"],
        first=f"{culprits[0]['kind']} {culprits[0]['id']}" if culprits else "",
        share=verdict["loss_share"],
        also=tuple(verdict["also"]),
    )


def row(number: int, run: DemoRun) -> str:
    """Return a line of the table."""
    told = f"{run.mode}{f': {run.first}' if run.first else ''}"
    cost = f"{run.share:.1%}" if run.share else "-"
    right = "yes" if run.is_right else "NO"
    return pages.row([number, run.name, run.beside, f"{run.load:.1f}", told, cost, run.exit_code, right])


def main() -> None:
    """Run the demo again and again, and print what its reports say."""
    args = command_line(__doc__)
    print(pages.table(("demo", "run", "beside it", "load", "verdict", "cost", "exit", "right"), []), flush=True)
    found: list[DemoRun] = []
    for number in range(1, args.runs + 1):
        num_busy = args.load if number % 2 == 0 else 0
        with busy(num_busy, _BUSY, _COMPILE):
            both = run_demo(args.folder.absolute(), f"{num_busy} busy" if num_busy else "nothing")
        for run in both:
            print(row(number, run), flush=True)
        found += both
    shutil.rmtree(args.folder, ignore_errors=True)
    for name in ("clean", "slow-rank-2"):
        of_name = [run for run in found if run.name == name]
        print(f"{name}: {sum(run.is_right for run in of_name)} of {len(of_name)} right")
    durations = sorted(run.duration_s for run in found)
    print(f"both runs took {durations[0]:.0f} to {durations[-1]:.0f} s, median {durations[len(durations) // 2]:.0f} s")
    sys.exit(0 if all(run.is_right for run in found) else 1)


if __name__ == "__main__":
    main()
