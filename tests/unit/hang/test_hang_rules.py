"""The rules on hangs, on simulated jobs of known truth."""

from __future__ import annotations

import random

from cases import each_case
from known_hangs import KINDS, broken_job

from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import HangKind

NAMED = [kind for kind in KINDS if kind not in ("network", "disorder")]


@each_case("seed", range(30))
@each_case("kind", NAMED)
def test_a_fault_is_named_with_its_kind_and_rank(kind: str, seed: int) -> None:
    job = broken_job(kind, seed)
    hang = find_hang(job.view())
    assert hang is not None
    assert (hang.kind, hang.culprits) == (KINDS[kind], (job.fault.rank,))


@each_case("seed", range(30))
def test_nobody_is_named_where_an_operation_that_all_have_entered_does_not_move(seed: int) -> None:
    hang = find_hang(broken_job("network", seed).view())
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.could_be) == (HangKind.NETWORK, (), ())


@each_case("seed", range(30))
def test_operations_of_groups_in_another_order_are_found(seed: int) -> None:
    job = broken_job("disorder", seed)
    hang = find_hang(job.view())
    assert hang is not None
    assert hang.kind is HangKind.DISORDER
    assert hang.culprits == (job.fault.rank,) or job.fault.rank in hang.could_be


@each_case("seed", range(30))
@each_case("kind", KINDS)
def test_an_innocent_rank_is_never_named_where_records_are_missing(kind: str, seed: int) -> None:
    job = broken_job(kind, seed)
    chance = random.Random(seed)
    guilty = set() if kind == "network" else {job.fault.rank}
    for share in (0.2, 0.5, 0.8):
        hidden = {rank: chance.choice(("record", "end")) for rank in range(job.mesh.size) if chance.random() < share}
        hang = find_hang(job.view(hidden))
        if hang is None:  # no rank with a record waits
            continue
        assert set(hang.culprits) <= guilty
        # Of one order in a group with many unknown, it cannot be told that it is the wrong one.
        if kind not in ("network", "disorder") and hang.could_be:
            assert guilty <= set(hang.could_be)


@each_case("kind", KINDS)
def test_nothing_hangs_before_its_time(kind: str) -> None:
    job = broken_job(kind, 1).view()
    oldest = min(call.entered_ns or 0 for view in job.ranks.values() for call in view.calls if call.is_open)
    assert find_hang(job, least_ns=job.now_ns - oldest + 1) is None
    assert find_hang(job, least_ns=job.now_ns - oldest) is not None


def test_a_job_that_waits_for_nothing_does_not_hang() -> None:
    job = broken_job("stuck", 3)
    job.fault.at = -1
    job.run()
    assert not job.hangs
    assert find_hang(job.view()) is None
