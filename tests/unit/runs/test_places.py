"""Which host or rank changed, in many made-up pairs of runs: named at the stated rate where none did, and found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cases import chosen, each_case
from sample_runs import sample_run

from hpcpace.core.change import Outcome
from hpcpace.report.sections.comparison import place_sentences
from hpcpace.runs.compare import compare
from hpcpace.runs.measured import MeasuredRun
from hpcpace.runs.units import UnitChanges, unit_changes

PAIRS = 100
SLOWER = 0.05


def _run(name: str, work: np.ndarray, num_hosts: int) -> MeasuredRun:
    hosts = [f"n{rank * num_hosts // len(work)}" for rank in range(len(work))]
    return sample_run(name, work=(100 * np.exp(work)).tolist(), hosts=hosts)


def _changes(
    random: np.random.Generator,
    shape: tuple[int, int],
    repeats: int,
    *,
    run_cv: float = 0.003,
    rank_cv: float = 0.01,
    slower: range = range(0),
) -> UnitChanges:
    """Return what changed between two groups of runs of hosts with ranks each; some ranks are slower in B."""
    groups = []
    for side in "ab":
        work = random.normal(0, run_cv, (repeats, 1)) + random.normal(0, rank_cv, (repeats, shape[0] * shape[1]))
        if side == "b":
            work[:, slower] += np.log1p(SLOWER)
        groups.append([_run(f"{side}{number}", of_run, shape[0]) for number, of_run in enumerate(work)])
    found = unit_changes(*groups, prior_cv=0.01, has_same_layout=True)
    assert found is not None
    return found


@each_case(
    ("shape", "repeats", "rank_cv"),
    chosen(
        [
            ((4, 4), 3, 0.005),
            ((4, 8), 5, 0.01),
            ((8, 8), 3, 0.01),
            ((8, 8), 2, 0.02),
            ((8, 8), 1, 0.02),
            ((4, 8), 1, 0.01),
        ],
        3,
    ),
)
def test_ranks_that_vary_are_named_in_few_pairs_of_equal_runs(
    shape: tuple[int, int], repeats: int, rank_cv: float
) -> None:
    random = np.random.default_rng(0)
    num_named = sum(bool(_changes(random, shape, repeats, rank_cv=rank_cv).named) for _ in range(PAIRS))
    assert num_named <= 11  # 5 % and 2.7 standard errors


@each_case("num_hosts", [4, 8])
@each_case("repeats", [1, 3])
def test_hosts_are_named_in_few_pairs_of_runs_that_differ_as_a_whole(num_hosts: int, repeats: int) -> None:
    random = np.random.default_rng(1)
    found = [_changes(random, (num_hosts, 1), repeats, run_cv=0.02, rank_cv=0.003) for _ in range(PAIRS)]
    assert sum(bool(places.named) for places in found) <= 11


@each_case("shape", chosen([(4, 1), (8, 1), (8, 8)], 2))
def test_intervals_of_hosts_have_what_whole_runs_differ_by(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(2)
    found = [_changes(random, shape, 3, run_cv=0.02, rank_cv=0.003) for _ in range(PAIRS)]
    assert sum(places.is_common for places in found) <= 11
    held = [
        all(row.change is not None and row.change.low <= 0 <= row.change.high for row in places.hosts)
        for places in found
    ]
    assert sum(held) >= 89


@each_case(("shape", "repeats"), chosen([((4, 4), 3), ((8, 8), 3), ((2, 4), 3), ((8, 8), 2)], 2))
def test_a_slower_rank_is_found_and_not_its_host(shape: tuple[int, int], repeats: int) -> None:
    random = np.random.default_rng(3)
    found = [_changes(random, shape, repeats, slower=range(1, 2)).named for _ in range(PAIRS)]
    assert sum([row.name for row in named] == ["1 on n0"] for named in found) >= 75


@each_case("shape", chosen([(4, 1), (8, 1), (4, 4), (8, 8)], 2))
def test_a_slower_host_is_found_and_not_its_ranks(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(4)
    slower = range(shape[1], 2 * shape[1])
    found = [_changes(random, shape, 3, slower=slower).named for _ in range(PAIRS)]
    assert sum([row.name for row in named] == ["n1"] for named in found) >= 85


def test_a_rank_so_slow_that_the_mean_of_its_host_changed_is_named_alone() -> None:
    work = np.zeros((6, 32)) + np.arange(6)[:, np.newaxis] % 3 * 1e-3
    work[3:, 9] += 0.2
    runs = [_run(f"r{number}", of_run, 8) for number, of_run in enumerate(work)]
    found = compare(runs[:3], runs[3:]).places
    assert found is not None and [row.name for row in found.named] == ["9 on n2"]
    (host,) = [row for row in found.hosts if row.name == "n2"]
    assert host.beyond is not None and host.beyond.is_beyond_noise and not host.is_named


def test_more_work_of_all_hosts_that_the_step_does_not_show_is_said_to_be_so() -> None:
    before = _run("a", np.zeros(8), 8)
    after = replace(_run("b", np.full(8, np.log1p(0.05)), 8), p50_ns=before.p50_ns, mean_ns=before.mean_ns)
    found = compare([before], [after])
    assert found.outcome is Outcome.SAME
    (sentence,) = place_sentences(found)
    assert sentence == "own work takes 5.0 % more time on most hosts, though steps do not differ beyond noise"


@each_case("num_ranks", [2, 3, 4, 8])
def test_of_one_host_the_rank_that_changed_is_named_and_the_others_are_not(num_ranks: int) -> None:
    before, after = np.zeros(num_ranks), np.zeros(num_ranks)
    after[1] = np.log(2)
    found = unit_changes([_run("a", before, 1)], [_run("b", after, 1)], prior_cv=0.01, has_same_layout=True)
    assert found is not None and not found.is_common
    assert [(row.name, round(row.beyond_share, 6)) for row in found.named] == [("1 on n0", 1.0)]
    everywhere = unit_changes([_run("a", before, 1)], [_run("b", before + 0.1, 1)], prior_cv=0.01, has_same_layout=True)
    assert everywhere is not None and everywhere.is_common and everywhere.named == ()


@each_case(("num_hosts", "per_host"), [(6, 1), (8, 1), (6, 2)])
def test_where_half_of_the_hosts_got_slower_these_are_named(num_hosts: int, per_host: int) -> None:
    random = np.random.default_rng(5)
    before, after = random.normal(0, 0.002, (2, num_hosts * per_host))
    after[: len(after) // 2] += 0.07
    found = unit_changes(
        [_run("a", before, num_hosts)], [_run("b", after, num_hosts)], prior_cv=0.01, has_same_layout=True
    )
    assert found is not None and not found.is_common
    assert sorted(row.name for row in found.named) == [f"n{host}" for host in range(num_hosts // 2)]


@each_case("sign", [1, -1])
@each_case("num_hosts", [3, 6])
def test_a_host_that_stayed_as_it_was_is_not_told_to_be_faster_or_slower(num_hosts: int, sign: int) -> None:
    before, after = np.zeros(num_hosts), np.zeros(num_hosts)
    after[1:] = sign * 0.07
    found = compare([_run("a", before, num_hosts)], [_run("b", after, num_hosts)])
    common, of_host = place_sentences(found)
    assert f"% {'more' if sign > 0 else 'less'} time on most hosts" in common
    assert of_host.startswith("n0 did not change as most others did: its own work by 0.0 % (95 %: -")


def test_of_one_host_what_most_ranks_changed_by_is_told_of_these() -> None:
    before, after = np.zeros(8), np.zeros(8)
    after[:5] = 0.08
    found = compare([_run("a", before, 1)], [_run("b", after, 1)])
    common, *others = place_sentences(found)
    assert common == "own work takes 8.3 % more time on most ranks of n0"
    assert [text.partition(" did not")[0] for text in others] == ["rank 5 on n0", "rank 6 on n0", "rank 7 on n0"]
