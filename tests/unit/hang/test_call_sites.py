"""Ranks that call an operation too many or too few, as call sites show it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Mapping

from hpcpace.hang.rules import find_hang
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import Call, Channel, GroupView, Hang, HangKind, JobView, RankView

# A letter is a barrier from a line of its own, a dot one from an unknown line, a digit an all_reduce of that size from
# an unknown line. The last one has not finished where `!` follows. A number before `:` is that of the first call.
LOOP = "abc" * 4


def views(records: Mapping[int, str], channel: Channel) -> dict[int, RankView]:
    found = {}
    for rank, text in records.items():
        begin, _, letters = text.rpartition(":")
        first, names = int(begin or 0), letters.removesuffix("!")
        calls = tuple(
            Call(
                channel=channel,
                seq=seq,
                op="all_reduce" if name.isdecimal() else "barrier",
                size_bytes=int(name) if name.isdecimal() else 4,
                entered_ns=1000 + seq,
                is_open=letters.endswith("!") and seq == first + len(names) - 1,
                where=f"run.py:{ord(name)} in {name}" if name.isalpha() else "",
                site=(f"run.py:{ord(name)} in {name}", "run.py:1 in main") if name.isalpha() else (),
            )
            for seq, name in enumerate(names, start=first)
        )
        found[rank] = RankView(rank=rank, entered={channel: first + len(names)}, calls=calls)
    return found


def job_of(records: Mapping[int, str]) -> JobView:
    return JobView(
        groups=(GroupView(name="dp", members=tuple(records)),), ranks=views(records, Channel(0)), now_ns=9000
    )


def found(records: Mapping[int, str]) -> Hang:
    hang = find_hang(job_of(records))
    assert hang is not None, records
    return hang


def among(own: str, others: str, ranks: tuple[int, ...] = (0,), num_ranks: int = 4) -> dict[int, str]:
    return {rank: own if rank in ranks else others for rank in range(num_ranks)}


PROVEN: dict[str, tuple[dict[int, str], HangKind, tuple[int, ...], int]] = {
    "only rank 0 saves, and all end": (among("aaaSe!", "aaae"), HangKind.TOO_MANY, (0,), 3),
    "only rank 0 saves, and the others go on": (among("aaaSb!", "aaabc!"), HangKind.TOO_MANY, (0,), 3),
    "long before the hang": (among("ab" + "S" + LOOP + "a!", "ab" + LOOP), HangKind.TOO_MANY, (0,), 2),
    "among calls that are all alike": (among("1111S111!", "1111111"), HangKind.TOO_MANY, (0,), 4),
    "of another size, without call sites": (among("1221" + "9" + "221221!", "1221221221"), HangKind.TOO_MANY, (0,), 4),
    "a whole evaluation": (among("abVWVWVWabc!", "ababc"), HangKind.TOO_MANY, (0,), 2),
    "twice": (among("abSabcabcSabcab!", "ababcabcabc"), HangKind.TOO_MANY, (0,), 2),
    "first of all": (among("Sabc!", "abc"), HangKind.TOO_MANY, (0,), 0),
    "one rank of each node": (among("abSab!", "abab", (0, 4), 8), HangKind.TOO_MANY, (0, 4), 2),
    "before another operation": (among("abSab1!", "ababc!"), HangKind.TOO_MANY, (0,), 2),
    "another rank than 0": (among("abSab!", "abab", (3,)), HangKind.TOO_MANY, (3,), 2),
    "one rank leaves it out": (among("ababb", "abSabb!", (2,)), HangKind.TOO_FEW, (2,), 2),
    "several leave it out": (among("ababb", "abSabb!", (2, 3), 8), HangKind.TOO_FEW, (2, 3), 2),
    "left out though all called it before": (among("SabSabab", "SabSabSab!", (1,)), HangKind.TOO_FEW, (1,), 6),
}


def test_call_sites_show_who_called_too_much_or_too_little_and_where() -> None:
    wrong = {}
    for name, (records, kind, culprits, place) in PROVEN.items():
        hang = found(records)
        at = hang.extra[0].seq if hang.extra else -1
        if (hang.kind, hang.culprits, at) != (kind, culprits, place):
            wrong[name] = (hang.kind, hang.culprits, hang.could_be, at)
    assert not wrong


OPEN: dict[str, tuple[dict[int, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "one of two": (among("abSab!", "abab", (0,), 2), ((0,), (1,))),
    "two of four": (among("abSab!", "abab", (0, 2)), ((0, 2), (1, 3))),
    "what all called before": (among("SabSabSab!", "SabSabab"), ((0,), (1, 2, 3))),
    "an iteration more": (among(LOOP + "abcE!", LOOP + "E"), ((0,), (1, 2, 3))),
    "half of the records have no call sites": (
        {0: "abSab!", 1: "abab", 2: "....", 3: "...."},
        ((0,), (1,)),
    ),
    "no call sites": (among("1111!", "111"), ((0,), (1, 2, 3))),
    "the same call sites": (among("aaaa!", "aaa"), ((0,), (1, 2, 3))),
    "records that begin after it": (among("40:cabcabca!", "40:abcabca"), ((0,), (1, 2, 3))),
}


def test_what_nothing_proves_is_a_set_of_two_sides() -> None:
    wrong = {}
    for name, (records, sides) in OPEN.items():
        hang = found(records)
        if hang.culprits or hang.sides != sides or set(hang.could_be) != {*sides[0], *sides[1]}:
            wrong[name] = (hang.kind, hang.culprits, hang.could_be, hang.sides)
    assert not wrong


USUAL: dict[str, tuple[dict[int, str], HangKind, tuple[int, ...]]] = {
    "stages on lines of their own": (
        {0: "abab!", 1: "cdcd!", 2: "efef!", 3: "ghg"},
        HangKind.NEVER_CALLED,
        (3,),
    ),
    "rank 0 on its own line of an if": (
        {0: "aXbaXba!", 1: "aYbaYba!", 2: "aYbaYba!", 3: "aYbaYb"},
        HangKind.NEVER_CALLED,
        (3,),
    ),
    "ranks that take turns": (
        {0: "aXaYaYa!", 1: "aYaXaYa!", 2: "aYaYaXa!", 3: "aYaYaY"},
        HangKind.NEVER_CALLED,
        (3,),
    ),
    "another operation in one place": (among("ab1!", "abc!"), HangKind.MISMATCH, (0,)),
    "another operation among equal ones": (among("ab1c!", "abac!"), HangKind.NETWORK, ()),
}


def test_lines_that_differ_in_order_name_nobody() -> None:
    wrong = {}
    for name, (records, kind, culprits) in USUAL.items():
        hang = found(records)
        if (hang.kind, hang.culprits) != (kind, culprits):
            wrong[name] = (hang.kind, hang.culprits, hang.could_be)
    assert not wrong


def test_the_verdict_says_which_call_is_too_many_and_what_the_others_called() -> None:
    job = job_of(among("aaaSe!", "aaae"))
    hang = find_hang(job)
    assert hang is not None
    said = describe(hang, job)
    assert said.headline == (
        "hang: rank 0 called one operation too many: barrier 3 of group dp at run.py:83 in S, which the others did not"
        " call"
    )
    assert said.why[0] == (
        "ranks 1-3 called barrier 3 at run.py:101 in e instead, which rank 0 called 1 operation later"
    )
    assert "run.py:83 in S" in said.advice
