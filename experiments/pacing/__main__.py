"""Runs the experiments on pacing: `make pacing`, or `python -m experiments.pacing [NAME...] [--write] [--try]`.

Options:
  names NAME...  run only these
  --write        put the sections into docs/results/pacing-experiments.md
  --try          run each for seconds only, to see that it works
  --no-lab       skip experiments that need root and Slurm
"""

from __future__ import annotations

import sys
import time

from experiments.jobs import teller
from experiments.options import command_line
from experiments.pacing import trial_judged
from experiments.pacing.experiment import Effort, Experiment, section_of, write_section
from experiments.pacing.on_cores import AUTO_COST, AUTO_GAIN, COLLECTIONS, POLLING, WAITING
from experiments.pacing.on_hosts import HOSTS
from experiments.pacing.on_links import TURNS
from experiments.pages import RESULTS

EXPERIMENTS = (trial_judged.EXPERIMENT, POLLING, COLLECTIONS, WAITING, AUTO_COST, AUTO_GAIN, TURNS, HOSTS)
DOCUMENT = RESULTS / "pacing-experiments.md"


def main() -> None:
    args, names = command_line(__doc__), [experiment.name for experiment in EXPERIMENTS]
    if unknown := set(args.names) - set(names):
        sys.exit(f"no experiment {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    if args.write and getattr(args, "try"):
        sys.exit("figures of --try mean nothing, and are not written: leave out one of the two")
    chosen = [experiment for experiment in EXPERIMENTS if not args.names or experiment.name in args.names]
    failed = []
    for experiment in chosen:
        if experiment.needs_lab and args.no_lab:
            print(f"{experiment.name}: skipped, needs root and Slurm", flush=True)
            continue
        if not carry_out(experiment, Effort.TRY if getattr(args, "try") else Effort.FULL, is_written=args.write):
            failed.append(experiment.name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def carry_out(experiment: Experiment, effort: Effort, *, is_written: bool) -> bool:
    """Run an experiment, print its section, and return whether it completed, whatever the result."""
    begin_s = time.monotonic()
    tell = teller(begin_s, name=experiment.name, file=sys.stderr)
    try:
        finding = experiment.run(effort, tell)
    except Exception as error:  # the boundary between one experiment and the next
        tell(f"failed: {type(error).__name__}: {error}")
        return False
    section = section_of(experiment, finding, duration_s=time.monotonic() - begin_s)
    print(section + "\n", flush=True)
    if is_written:
        write_section(DOCUMENT, EXPERIMENTS, experiment.name, section)
    return True


if __name__ == "__main__":
    main()
