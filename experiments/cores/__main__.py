"""Ranks that wait or lack cores, on live jobs of this machine: does the report say which rank, and why?

    python -m experiments.cores --times 5

Each case is a data-parallel job of gloo ranks whose last rank is different. The table counts jobs whose verdict names
that rank with its cause, those that leave it open, and those that contradict the truth; with the load average, because
waiting for cores depends on what else runs. `--keep` keeps the runs, and `--judge` reports kept ones again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.jobs import Rows, clean_environ, ended_in_time, free_port, started, verdict_of
from experiments.pages import cases_of, read_toml
from hpcpace.diagnosis.summary import Mode

_PROGRAM = Path(__file__).with_name("rank.py")


@dataclass(frozen=True, kw_only=True)
class CoreCase:
    """What is different on the last rank, and what a report must say of it.

    Attributes:
        name: its name.
        modes: the right verdicts.
        words: of which each must be in the verdict with its figures and its advice.
        num_ranks: ranks of the job.
        environ: variables of the last rank.
    """

    name: str
    modes: tuple[str, ...]
    num_ranks: int
    words: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


CASES = tuple(
    case
    for row in read_toml(__file__, "cases")["case"]
    for case in cases_of(CoreCase, ({**row, "num_ranks": number} for number in row["num_ranks"]))
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="how often to run each case")
    parser.add_argument("--steps", type=int, default=120, help="steps of each job")
    parser.add_argument("--cases", nargs="+", choices=sorted({case.name for case in CASES}), help="run only these")
    parser.add_argument("--results", type=Path, help="add what each job said to this file")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--judge", action="store_true", help="run nothing, and report the runs kept there")
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.cases or case.name in args.cases]
    print("case      ranks  right  undecided  wrong  load")
    for case in chosen:
        outcomes, loads = [], []
        for turn in range(args.times):
            loads.append(os.getloadavg()[0])
            with _folder(args.keep, f"{case.name}-{case.num_ranks}-{turn}") as folder:
                verdict = verdict_of(folder / "run") if args.judge else run(case, folder, args.steps)
            outcomes.append(outcome_of(case, verdict))
            if args.results is not None:
                row = {"case": case.name, "ranks": case.num_ranks, "load": loads[-1], "outcome": outcomes[-1]}
                Rows(args.results).add({**row, "verdict": verdict})
        counts = [outcomes.count(word) for word in ("right", "undecided", "wrong")]
        load = f"{min(loads):.1f} to {max(loads):.1f}"
        print(f"{case.name:9} {case.num_ranks:5}  {counts[0]:5}  {counts[1]:9}  {counts[2]:5}  {load}", flush=True)


@contextmanager
def _folder(kept: Path | None, name: str) -> Iterator[Path]:
    if kept is not None:
        (kept / name).mkdir(parents=True, exist_ok=True)
        yield kept / name
        return
    # Not below /tmp: that may be memory, which no file is read from without a copy in it.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hpcpace-cores-") as folder:
        yield Path(folder)


def run(case: CoreCase, folder: Path, num_steps: int) -> dict[str, Any]:
    """Run a job and return the verdict of its report."""
    port, last = str(free_port()), case.num_ranks - 1
    command = [sys.executable, "-m", "hpcpace", "trace", "--run-dir", folder / "run", "--", _PROGRAM]
    command += [case.name, folder, num_steps]
    ranks = []
    for rank in range(case.num_ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(case.num_ranks), "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(case.num_ranks)}
        place |= {"OMP_NUM_THREADS": "2"} if case.name == "mask" else {}
        place |= dict(case.environ) if rank == last else {}
        ranks.append(started(command, env=clean_environ(**place), cwd=folder))
    ended_in_time(ranks, timeout_s=300)
    return verdict_of(folder / "run")


def outcome_of(case: CoreCase, verdict: dict[str, Any]) -> str:
    """Return whether a verdict is right, undecided or wrong."""
    named = {each["id"] for each in verdict["culprits"] if each["kind"] == "rank"}
    last = str(case.num_ranks - 1)
    if case.name == "healthy":
        return "right" if verdict["mode"] in case.modes and not named else "wrong"
    said = " ".join([verdict["headline"], *verdict["why"], *verdict["next"]])
    is_named = last in named or case.num_ranks == 1
    if verdict["mode"] in case.modes and named == {last} and all(word in said for word in case.words):
        return "right"
    is_contradicted = bool(named - {last}) or verdict["mode"] == Mode.HEALTHY
    is_other_cause = is_named and verdict["mode"] == Mode.STRAGGLER and case.modes == (Mode.CORES,)
    return "wrong" if is_contradicted or is_other_cause else "undecided"


if __name__ == "__main__":
    main()
