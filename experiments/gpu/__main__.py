"""First light on a GPU: everything that hpcpace does there, measured once, in at most nine minutes.

Start it by experiments/gpu/first_light.sh, which installs what the machine lacks. See docs/results/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

from experiments.gpu.page import write_page
from experiments.gpu.place import Place
from experiments.gpu.runner import (
    FAILED,
    LOGS,
    REHEARSAL_FACTOR,
    RESULTS,
    SETUP_S,
    STEPS,
    TIMEOUT,
    TOTAL_S,
    Runner,
    adopt_orphans,
)

WORK = Path("build/first-light")


def main() -> None:
    """Run the steps, one of them inside its own process, or write the page."""
    parser = argparse.ArgumentParser(prog="experiments/gpu/first_light.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=WORK / "results", help=f"folder for {RESULTS} and {LOGS}")
    parser.add_argument("--only", metavar="a,c", help="run only these steps, and keep the results of the others")
    parser.add_argument("--rehearse", action="store_true", help="run on CPUs, with small sizes")
    parser.add_argument("--clocks", action="store_true", help="lower the clocks of the GPU for a moment in step i")
    parser.add_argument("--budget", type=float, default=TOTAL_S - SETUP_S, help=argparse.SUPPRESS)
    parser.add_argument(
        "--write", type=Path, nargs="+", metavar="FOLDER", help="put the results of folders into docs/results/gpu.md"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        print(f"written: {write_page(args.write)}")
        return
    options = [option for option in ("rehearse", "clocks") if getattr(args, option)]
    if args.inside:
        step = next(step for step in STEPS if step.name == args.inside)
        place = Place(name=step.name, folder=WORK / step.name, is_rehearsal=args.rehearse, may_set_clocks=args.clocks)
        importlib.import_module("experiments.gpu.measures").MEASURES[step.measure](place)  # loads torch
        return
    names = [step.name for step in STEPS] if args.only is None else args.only.split(",")
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"--only takes {', '.join(step.name for step in STEPS)}, not {', '.join(sorted(unknown))}")
    steps = [step for step in STEPS if step.name in names]
    runner = Runner(
        out=args.out,
        work=WORK,
        options=[f"--{option}" for option in options],
        budget_s=args.budget,
        factor=REHEARSAL_FACTOR if args.rehearse else 1,
    )
    adopt_orphans()
    results = runner.run(steps, _facts(is_rehearsal=args.rehearse))
    print(f"\nresults: {args.out / RESULTS}, logs: {args.out / LOGS}")
    sys.exit(any(result.status in (FAILED, TIMEOUT) for result in results))


def _facts(*, is_rehearsal: bool) -> dict[str, Any]:
    """Return what the results of all steps are of."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not is_rehearsal:
        sys.exit("torch sees no GPU here; --rehearse runs on CPUs")
    return {
        "rehearsal": is_rehearsal,
        "device": "CPUs" if is_rehearsal else torch.cuda.get_device_name(),
        "versions": {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda},
        "cores": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    main()
