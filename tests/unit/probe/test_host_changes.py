"""Pairs, noise and copies after maintenance: what became worse is named, and what one probe lacks is said."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from math import log

from cases import each_case
from probe_sample import made_copies, made_noise, made_pairs, made_probe
from rich.console import Console

from hpcpace.probe.changes import ProbeChange, changes, host_changes, is_unclear, left_out, outcome_words
from hpcpace.probe.record import PairsRecord, ProbeRecord
from hpcpace.report.sections.probe import changes_section
from hpcpace.report.terminal import print_section


def change_lines(found: Sequence[ProbeChange], remarks: Sequence[str]) -> list[str]:
    stream = io.StringIO()
    print_section(Console(file=stream, width=80, highlight=False, color_system=None), changes_section(found, remarks))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def _whole(seed: int = 0, **values: object) -> ProbeRecord:
    parts = {"pairs": made_pairs(seed=seed), "noise": made_noise(seed=seed), "copies": made_copies(seed=seed)}
    return made_probe(seed=seed, **{**parts, **values})


def _once(pairs: PairsRecord) -> PairsRecord:
    """Return the pairs with the first of their three rounds."""
    return replace(pairs, rows=pairs.rows[::3])


def _slower(before: ProbeRecord, after: ProbeRecord) -> list[tuple[str, str]]:
    return [(one.name, one.kind) for one in host_changes(before, after) if one.is_slower]


def test_the_same_hosts_are_not_worse_in_twenty_pairs_of_probes() -> None:
    for seed in range(20):
        found = changes(_whole(2 * seed), _whole(2 * seed + 1))
        assert {one.part for one in found} == {"sweep", "pairs", "noise", "copies"}
        assert not any(one.is_slower or one.is_faster for one in found)
        assert not is_unclear(found)
    assert outcome_words(found).startswith("not slower: nothing changed")


def test_one_slow_pair_is_named_with_its_direction() -> None:
    after = _whole(1, pairs=made_pairs(slow={("n1", "n3"): 0.7}, seed=1))
    assert _slower(_whole(), after) == [("n1 to n3", "rate")]
    assert outcome_words(changes(_whole(), after)).startswith("slower: n1 to n3 takes 4")


def test_a_late_pair_is_named() -> None:
    after = _whole(1, pairs=made_pairs(late={("n2", "n4"): 3.0}, seed=1))
    assert _slower(_whole(), after) == [("n2 and n4", "latency")]


def test_latency_that_grows_by_less_than_5_us_is_not_worse() -> None:
    after = _whole(1, pairs=made_pairs(late={("n2", "n4"): 1.2}, seed=1))
    assert _slower(_whole(), after) == []


def test_a_pair_measured_once_needs_more_than_a_disturbance_costs() -> None:
    disturbed = _once(made_pairs(slow={("n1", "n3"): 0.7}))
    broken = _once(made_pairs(slow={("n1", "n3"): 0.4}))
    assert _slower(_whole(), _whole(pairs=disturbed)) == []
    assert [one.name for one in host_changes(_whole(), _whole(pairs=disturbed)) if not one.is_decided] == ["n1 to n3"]
    assert _slower(_whole(), _whole(pairs=broken)) == [("n1 to n3", "rate")]


def test_slow_uplinks_are_named() -> None:
    pairs = made_pairs(seed=1)
    slow = tuple(replace(row, rate=0.5 * row.rate) for row in pairs.bisections if row.source == "leaf2")
    assert _slower(_whole(), _whole(1, pairs=replace(pairs, bisections=slow))) == [("all of leaf2 to leaf1", "uplinks")]


@each_case(("more", "is_worse"), [(0.005, False), (0.05, True), (1.0, True)])
def test_a_core_that_loses_more_time_is_named(more: float, is_worse: bool) -> None:
    after = _whole(1, noise=made_noise(robbed={("n2", 3): more}, seed=1))
    assert _slower(_whole(), after) == ([("n2 core 3", "noise")] if is_worse else [])


def test_slower_copies_are_named_by_node_and_device() -> None:
    after = _whole(1, copies=made_copies(slow=0.6, seed=1))
    assert _slower(_whole(), after) == [
        ("n1 NUMA node 1", "memory"),
        ("n1 GPU 0 NUMA node 0 pinned to it", "device"),
        ("n1 GPU 0 NUMA node 0 not pinned to it", "device"),
    ]


@each_case("part", ["sweep", "pairs", "noise", "copies"])
def test_a_part_that_one_probe_lacks_is_said_and_not_compared(part: str) -> None:
    lacking = _whole(1, **{part: () if part == "sweep" else None})
    for before, after, who in ((_whole(), lacking, "the other probe"), (lacking, _whole(), "this probe")):
        found = changes(before, after)
        assert part not in {one.part for one in found}
        assert left_out(before, after) == [f"{part}: only {who} measured it, so it is not compared"]
        assert f"- {left_out(before, after)[0]}" in change_lines(found, left_out(before, after))


def test_a_part_that_both_lack_is_not_mentioned() -> None:
    assert left_out(made_probe(), made_probe(seed=1)) == []


def test_pairs_in_one_probe_only_are_counted() -> None:
    after = _whole(pairs=made_pairs(hosts=("n1", "n2", "n3")))
    assert left_out(_whole(), after) == ["pairs: 6 of 12 are in one probe only, and not compared"]


def test_probes_with_nothing_in_common_cannot_tell() -> None:
    nothing = {"sweep": (), "laws": (), "skews": ()}
    before, after = made_probe(noise=made_noise(), **nothing), made_probe(copies=made_copies(), **nothing)
    assert changes(before, after) == [] and is_unclear([])


def test_a_part_that_varies_too_much_is_unclear_although_another_is_not() -> None:
    found = changes(_whole(spread=1.0), _whole(1, spread=1.0))
    assert is_unclear(found)
    assert outcome_words(found).startswith("cannot tell: the times of sweep vary too much")


def test_lines_show_what_changed_and_count_the_rest() -> None:
    before, after = _whole(), _whole(1, noise=made_noise(robbed={("n2", 3): 0.05}, seed=1))
    found = changes(before, after)
    lines = change_lines(found, [])
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("n2 core 3") and "slower: time +5." in line for line in lines)
    assert "- noise: 8 comparisons, 1 slower" in lines
    assert "- copies: 12 comparisons, nothing changed" in lines


def test_a_change_that_stands_out_and_is_too_small_to_count_is_not_decided() -> None:
    change = ProbeChange(
        part="pairs", name="n1 to n2", kind="rate", value=log(1.3), low=log(1.2), high=log(1.4), least=0.5
    )
    assert not change.is_slower and not change.is_decided
