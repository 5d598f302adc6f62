"""Predicts sizes that were not seen, and names what stops a job: `python -m experiments.scale_lab`.

Each set-up has one thing injected, at 1 to 32 hosts. The law of 1 to 8 hosts is held against 16 and 32: the measured
mean step time has to be in the printed interval, and the part that stops the job has to be the injected one. On
simulated jobs (--simulated, a few minutes), and on real ones in a lab (--lab: root and Slurm). Both are resumable.
--write replaces the sections of what was done.

Options:
  --simulated      use simulated jobs
  --lab            use real jobs in a lab of 32 hosts
  --published      use published MLPerf results
  --only SETUP...  do only these set-ups
  --keep PATH      keep the runs in this folder and resume there, not below /tmp
  --timeout X      run jobs in the lab for this many seconds [3600]
  --write          write docs/results/scale-proof.md
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.options import command_line
from experiments.pages import counted, page, write_section
from experiments.scale_lab.in_lab import run_open
from experiments.scale_lab.judge import HELD_OUT, SETUPS, SIZES, UPLINK_MBIT, Judged, Setup, judge, write_run
from experiments.scale_lab.published import families

_TITLES = {"simulated": "Simulated jobs", "lab": "Real jobs in a lab"}


def main() -> None:
    args = command_line(__doc__, only=[setup.name for setup in SETUPS])
    setups = [setup for setup in SETUPS if not args.only or setup.name in args.only]
    sections = []
    with tempfile.TemporaryDirectory(prefix="hpcpace-scale-", dir="/var/tmp") as temporary:
        folder = args.keep.resolve() if args.keep else Path(temporary)
        if args.simulated:
            for number, setup in enumerate(setups):
                for size in (*SIZES, *HELD_OUT):
                    if not (path := folder / "simulated" / f"{setup.name}-{size}").exists():
                        write_run(path, setup, size, seed=number)
            sections.append(_section("simulated", _judged(folder / "simulated", setups)))
        if args.lab:
            (folder / "lab").mkdir(parents=True, exist_ok=True)
            run_open(folder / "lab", setups, timeout_s=args.timeout)
            sections.append(_section("lab", _judged(folder / "lab", setups)))
    if args.published:
        sections.append(_published())
        print(sections[-1])
    if args.write:
        for section in sections:
            write_section("scale-proof", section, title=page("scale-proof"))


def _judged(folder: Path, setups: Sequence[Setup]) -> list[Judged]:
    found = []
    for setup in setups:
        if sum((folder / f"{setup.name}-{size}").exists() for size in SIZES) == len(SIZES):
            found.append(judge(folder, setup))
            print(_line(found[-1]), flush=True)
    is_inside = [point.is_inside for one in found for point in one.points]
    named = sum(one.is_named for one in found)
    print(f"{counted(is_inside)} held-out sizes inside; {named} of {len(found)} parts named")
    return found


def _line(one: Judged) -> str:
    points = "; ".join(
        f"{point.num_hosts}: {point.measured_ms:.1f} ms in {point.low_ms:.1f}-{point.high_ms:.1f}"
        f"{'' if point.is_inside else ' NO'}"
        for point in one.points
    )
    return f"{one.setup.name}: {one.stopped_by or 'nothing'} {'' if one.is_named else 'NO '}({points})"


def _section(name: str, found: Sequence[Judged]) -> str:
    return page(
        "scale-proof-section",
        where=name,
        title=_TITLES[name],
        found=found,
        num_cores=os.cpu_count(),
        load=os.getloadavg()[2],
        rests_on=" or ".join(", ".join(map(str, sizes)) for sizes in sorted({one.known for one in found})),
        inside=counted(point.is_inside for one in found for point in one.points),
        num_whole=sum(all(point.is_inside for point in one.points) for one in found),
        num_named=sum(one.is_named for one in found),
        uplink_mbit=UPLINK_MBIT,
    ).strip()


def _published() -> str:
    found = families()
    judged = [family for family in found if family.outcome in ("inside", "outside")]
    rounds = sorted({family.name.split()[0] for family in found})
    counts = Counter(family.outcome for family in found)
    return page("scale-proof-published", judged=judged, rounds=rounds, counts=counts)


if __name__ == "__main__":
    main()
