"""Which operation ranks are paced at."""

from __future__ import annotations

from hpcpace.pace.choice import CandidateLog, PointCandidate, choose_points


def _seen(name: str, ranks: tuple[int, ...], *own_ns: int) -> PointCandidate:
    return PointCandidate(name=name, ranks=ranks, own_ns=own_ns)


def test_the_longest_wait_wins() -> None:
    seen = [
        [_seen("all_reduce 0", (0, 1), 10, 10), _seen("all_reduce 1", (0, 1), 90, 90)],
        [_seen("all_reduce 0", (0, 1), 70, 70), _seen("all_reduce 1", (0, 1), 80, 80)],
    ]
    (point,) = choose_points(seen)
    assert (point.name, point.ranks, point.wait_ns) == ("all_reduce 0", (0, 1), 30.0)


def test_waits_are_those_of_each_step_though_they_rotate() -> None:
    seen = [
        [_seen("steady", (0, 1), 40, 40), _seen("rotating", (0, 1), 0, 100)],
        [_seen("steady", (0, 1), 10, 10), _seen("rotating", (0, 1), 100, 0)],
    ]
    assert choose_points(seen)[0].name == "rotating"


def test_an_operation_that_not_all_ranks_of_its_group_saw_is_none() -> None:
    assert choose_points([[_seen("all_reduce 0", (0, 1), 50)], []]) == []


def test_a_group_of_one_has_no_point() -> None:
    assert choose_points([[_seen("all_reduce 0", (0,), 50)]]) == []


def test_groups_are_paced_each_at_its_own_point_and_a_rank_at_one() -> None:
    seen = [
        [_seen("backward 3", (0, 2), 10, 10), _seen("all_reduce 0", (0, 1), 3, 3)],
        [_seen("backward 5", (1, 3), 20, 20), _seen("all_reduce 0", (0, 1), 1, 1)],
        [_seen("backward 3", (0, 2), 50, 50)],
        [_seen("backward 5", (1, 3), 10, 10)],
    ]
    assert [(point.name, point.ranks) for point in choose_points(seen)] == [
        ("backward 3", (0, 2)),
        ("backward 5", (1, 3)),
    ]


def test_only_what_comes_once_in_every_step_in_one_group_is_regular() -> None:
    log = CandidateLog()
    for step in range(3):
        log.add("regular", (0, 1), 5)
        log.add("of unknown ranks", (), 5)
        log.add("of two groups", (0, 1) if step else (0, 2), 5)
        if step:
            log.add("sometimes", (0, 1), 5)
    assert [seen.name for seen in log.regular(3)] == ["regular"]
    assert log.regular(0) == []


def test_many_operations_are_cut_to_the_longest() -> None:
    log = CandidateLog()
    for index in range(200):
        log.add(f"all_reduce {index}", (0, 1), index)
    regular = log.regular(1)
    assert len(regular) == 64
    assert {seen.own_ns[0] for seen in regular} == set(range(136, 200))
