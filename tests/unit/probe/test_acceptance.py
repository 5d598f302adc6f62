"""A probe after maintenance: slower, not slower, too noisy to tell, or of another world."""

from __future__ import annotations

import pytest
from cases import each_case
from probe_sample import made_probe

from hpcpace.core.errors import ProbeError
from hpcpace.probe.changes import changes, check_comparable, outcome_words


@each_case("slowdown", [1.1, 1.5, 3.0])
def test_a_slower_operation_is_named_and_no_other(slowdown: float) -> None:
    found = changes(made_probe(), made_probe(slowdown=slowdown, seed=1))
    slower = [one for one in found if one.is_slower]
    assert {one.name for one in slower} == {"all_reduce"}
    assert {"rate"} <= {one.kind for one in slower}
    assert all(one.interval[0] <= slowdown - 1 <= one.interval[1] for one in slower)
    assert outcome_words(found).startswith("slower: all_reduce over")


def test_the_same_hosts_are_not_slower_in_fifty_pairs_of_probes() -> None:
    for seed in range(50):
        found = changes(made_probe(seed=2 * seed), made_probe(seed=2 * seed + 1))
        assert not any(one.is_slower or one.is_faster for one in found)
    assert outcome_words(found).startswith("not slower: nothing changed; it could have seen")


def test_a_faster_operation_is_not_slower() -> None:
    found = changes(made_probe(slowdown=2.0), made_probe(seed=1))
    assert not any(one.is_slower for one in found)
    assert outcome_words(found) == "not slower: 4 of 12 comparisons are faster"


def test_times_that_vary_much_cannot_tell() -> None:
    found = changes(made_probe(spread=1.0), made_probe(spread=1.0, slowdown=1.2, seed=1))
    assert not any(one.is_decided for one in found)
    assert outcome_words(found).startswith("cannot tell: times vary too much")


def test_one_round_each_cannot_tell() -> None:
    found = changes(made_probe(rounds=1), made_probe(rounds=1))
    assert found == []
    assert outcome_words(found).startswith("cannot tell: the probes have no operation and size in common")


@each_case(
    ("values", "reason"),
    [
        ({"cluster": "other"}, "cluster lab then, other now"),
        ({"hosts": ("n1", "n2", "n3", "n5")}, "hosts n1,n2,n3,n4 then, n1,n2,n3,n5 now"),
        ({"hosts": ("n1", "n2")}, "ranks per host 1,1,1,1 then, 1,1 now"),
        ({"device": "cuda", "device_name": "H100"}, "device cpu  then, cuda H100 now"),
        ({"backend": "nccl"}, "backend gloo then, nccl now"),
    ],
)
def test_a_probe_of_another_world_is_refused_with_what_differs(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ProbeError, match=reason):
        check_comparable(made_probe(), made_probe(**values))


def test_a_probe_of_the_same_world_in_another_job_is_comparable() -> None:
    check_comparable(made_probe(), made_probe(job_id="8", started_unix_ns=99))
