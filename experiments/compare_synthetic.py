"""How often `hpcpace compare` is right on made-up runs: `python -m experiments.compare_synthetic`.

Each run is 16 ranks on 8 hosts, or `--ranks` on each of `--hosts`, that compute and then wait for the slowest. Runs of
the same thing differ by `--run-cv` as a whole, and the speed of each host by that or `--host-cv`, of each rank by
`--rank-cv` as well; each rank's steps differ by `--noise`. Half of the pairs are A/A; in the other half a host of B
computes 5 % longer, or a rank with `--slower rank`. With `--long SHARE`, this share of the steps of all runs takes
twice as long, and in the other half B has `--more` of such steps on top, and no slower host. Only figures of runs are
made, as a report would find them, and no traces.

Options:
  --pairs N           of each kind [1000]
  --steps N  [100]
  --repeats N         runs of each side [1]
  --noise X           of each step, relative [0.01]
  --hosts N  [8]
  --ranks N           of each host [2]
  --run-cv X          standard deviation between runs and hosts [0.005]
  --host-cv X         of hosts, where it is another one
  --rank-cv X         of the ranks of a host [0.0]
  --slower host|rank  what is slower in B [host]
  --long X            share of steps that take twice as long [0.0]
  --more X            share of such steps that B has more, with --long [0.1]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.library.estimates import share_of
from experiments.options import command_line
from hpcpace.core.change import Outcome
from hpcpace.core.text import NS_PER_MS
from hpcpace.metrics.resampling import block_means, log_error
from hpcpace.runs.compare import compare
from hpcpace.runs.load import load_runs
from hpcpace.runs.measured import MeasuredRun, RankTimes, Transfers


@dataclass(frozen=True, kw_only=True)
class JudgedPair:
    """One pair.

    Attributes:
        share: by how much B is slower, as found.
        is_called: whether it was called slower or faster.
        is_slower: whether it was called slower.
        named: the hosts or ranks that were named.
        is_placed: whether the slower host, or the slower rank, was named and no other; False of A/A pairs.
    """

    share: float
    is_called: bool
    is_slower: bool
    named: tuple[str, ...]
    is_placed: bool


def judge_pair(before: Sequence[Path], after: Sequence[Path], slower: str = "") -> JudgedPair:
    """Compare two groups of runs with the defaults of the command.

    Args:
        before, after: the runs, one or more a side.
        slower: host or rank that is slower in the second group; empty of an A/A pair.

    Raises:
        ValueError: a run cannot be loaded.
    """
    runs = load_runs([*before, *after])
    measured = [run.measured for run in runs if run.measured is not None]
    if len(measured) < len(runs):
        raise ValueError("; ".join(run.problem for run in runs if run.measured is None))
    return judge_groups(measured[: len(before)], measured[len(before) :], slower)


def judge_groups(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], slower: str = "") -> JudgedPair:
    """Compare two groups of runs that were loaded; arguments as of `judge_pair`."""
    found = compare(before, after)
    named = tuple(row.name for row in found.places.named) if found.places is not None else ()
    hosts = {name.rpartition(" on ")[2] for name in named}
    return JudgedPair(
        share=found.share,
        is_called=found.outcome is not Outcome.SAME,
        is_slower=found.outcome is Outcome.SLOWER,
        named=named,
        is_placed=bool(slower) and {slower} in (hosts, set(named)),
    )


def score_lines(
    same: Sequence[JudgedPair], slow: Sequence[JudgedPair], *, what: str = "a 5 % slower host", place: str = "host"
) -> list[str]:
    """Return the result as lines; `what` the second runs of `slow` have, and at which kind of place, if at one."""
    called, named = sum(pair.is_called for pair in same), sum(bool(pair.named) for pair in same)
    found, placed = sum(pair.is_slower for pair in slow), sum(pair.is_placed for pair in slow)
    rows = (
        ("A/A pairs called different", called, len(same)),
        ("A/A pairs with a place named", named, len(same)),
        (f"pairs with {what} found slower", found, len(slow)),
        *([(f"the {place} named, and no other", placed, len(slow))] if place else []),
    )
    return [
        f"{row}: {count} of {total}, {share_of(count, total).as_percent(is_change=False)}"
        for row, count, total in rows
        if total
    ]


_WORK_NS, _TRANSFER_NS = 100.0 * NS_PER_MS, 5.0 * NS_PER_MS
_SLOWER = 0.05


def main() -> None:
    args = command_line(__doc__)
    random = np.random.default_rng(0)
    same = [_judged(random, None, args) for _ in range(args.pairs)]
    if args.long:
        slow = [_judged(random, None, args, more=args.more) for _ in range(args.pairs)]
        print(*score_lines(same, slow, what="more long steps", place=""), sep="\n")
        return
    num_places = args.hosts * (args.ranks if args.slower == "rank" else 1)
    slow = [_judged(random, int(random.integers(num_places)), args) for _ in range(args.pairs)]
    for line in score_lines(same, slow, what=f"a 5 % slower {args.slower}", place=args.slower):
        print(line)


def _judged(
    random: np.random.Generator, slower: int | None, args: argparse.Namespace, *, more: float = 0.0
) -> JudgedPair:
    sides = [
        [_run(f"{side}{number}", random, place, args, long) for number in range(args.repeats)]
        for side, place, long in (("a", None, args.long), ("b", slower, args.long + more))
    ]
    name = ""
    if slower is not None:
        name = f"n{slower}" if args.slower == "host" else f"{slower} on n{slower // args.ranks}"
    return judge_groups(sides[0], sides[1], name)


def _run(
    name: str, random: np.random.Generator, slower: int | None, args: argparse.Namespace, long: float
) -> MeasuredRun:
    host_cv = args.run_cv if args.host_cv is None else args.host_cv
    of_hosts = random.normal(0.0, args.run_cv) + random.normal(0.0, host_cv, args.hosts)
    speed = np.repeat(of_hosts, args.ranks) + random.normal(0.0, args.rank_cv, args.hosts * args.ranks)
    if slower is not None:
        num_slower = args.ranks if args.slower == "host" else 1
        speed[slower * num_slower : (slower + 1) * num_slower] += np.log1p(_SLOWER)
    steps = random.normal(1.0, args.noise, (len(speed), args.steps))
    if long:
        steps *= 1 + (random.random(args.steps) < long)
    hosts = [f"n{rank // args.ranks}" for rank in range(len(speed))]
    return _measured(name, _WORK_NS * np.exp(speed)[:, np.newaxis] * steps, hosts)


def _measured(name: str, work_ns: NDArray[np.float64], hosts: Sequence[str]) -> MeasuredRun:
    """Return the figures of a run whose ranks work for these times, (num_ranks, num_steps), and then wait."""
    times_ns = work_ns.max(axis=0) + _TRANSFER_NS
    return MeasuredRun(
        path=name,
        is_from_summary=False,
        p50_ns=float(np.median(times_ns)),
        mean_ns=float(times_ns.mean()),
        log_p50_error=log_error(times_ns, np.median, num_draws=50),
        log_mean_error=log_error(times_ns, np.mean, num_draws=50),
        cv=float(times_ns.std() / times_ns.mean()),
        samples_per_s=None,
        samples_per_step=64.0,
        samples_unit="samples",
        num_steps=len(times_ns),
        world_size=len(work_ns),
        hosts=tuple(dict.fromkeys(hosts)),
        mesh=f"dp={len(work_ns)}",
        ranks=tuple(_ranks(work_ns, hosts)),
        transfers=(Transfers(op="all_reduce", group_size=len(work_ns), transfer_ns=_TRANSFER_NS, size_bytes=1e6),),
    )


def _ranks(work_ns: NDArray[np.float64], hosts: Sequence[str]) -> Iterator[RankTimes]:
    mean_ns, means = work_ns.mean(axis=1), block_means(work_ns)
    errors = means.std(axis=1, ddof=1) / means.shape[1] ** 0.5 / mean_ns
    caused_ns = _caused(work_ns)
    wait_ns = (work_ns.max(axis=0) - work_ns).mean(axis=1)
    for rank, host in enumerate(hosts):
        yield RankTimes(
            rank=rank,
            host=host,
            role="all",
            parts_ns={"forward": float(mean_ns[rank]), "wait": float(wait_ns[rank]), "transfer": _TRANSFER_NS},
            work_ns=float(mean_ns[rank]),
            work_error=float(errors[rank]),
            caused_wait_ns=caused_ns[rank],
        )


def _caused(work_ns: NDArray[np.float64]) -> Sequence[float]:
    """Return the wait that began at each rank, which is the slowest of a step, mean over ranks and steps."""
    wait_ns = (work_ns.max(axis=0) - work_ns).mean(axis=0)
    caused_ns: list[float] = (np.bincount(work_ns.argmax(axis=0), wait_ns, len(work_ns)) / work_ns.shape[1]).tolist()
    return caused_ns


if __name__ == "__main__":
    main()
