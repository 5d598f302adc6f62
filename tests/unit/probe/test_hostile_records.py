"""A saved probe may be anybody's: whatever a file says within its types, comparing with it ends in short words."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from probe_sample import made_copies, made_noise, made_pairs, made_probe
from rich.console import Console

from hpcpace.core.errors import ProbeError
from hpcpace.probe.changes import changes, check_comparable, interval, is_unclear, left_out, outcome_words
from hpcpace.probe.laws import no_law_of, transfer_term
from hpcpace.probe.record import LatencyLaw, ProbeRecord, probe_from, read_probe
from hpcpace.report.sections.probe import changes_section
from hpcpace.report.terminal import print_section
from tests.unit.probe.test_probe_record import LAW, RECORD, piece

WHOLE = made_probe(pairs=made_pairs(), noise=made_noise(), copies=made_copies())
EXTREMES = (0, -1, 5e-324, 1e-300, 9.9e17, -9.9e17, 1e15, (1 << 63) - 1, -(1 << 62))


def compared(before: ProbeRecord, after: ProbeRecord) -> list[str]:
    found = changes(before, after)
    is_unclear(found)
    stream = io.StringIO()
    print_section(Console(file=stream, width=1000), changes_section(found, left_out(before, after)))
    return [*(line.rstrip() for line in stream.getvalue().splitlines()), outcome_words(found)]


def with_all(content: Any, value: float, places: list[str], path: str = "") -> Any:
    """Return JSON with all numbers in fields of the last name in `places` replaced."""
    if isinstance(content, dict):
        return {name: with_all(inner, value, places, name) for name, inner in content.items()}
    if isinstance(content, list):
        return [with_all(inner, value, places, path) for inner in content]
    is_number = isinstance(content, (int, float)) and not isinstance(content, bool)
    return value if is_number and path in places else content


def numbers(content: Any, name: str = "") -> Iterator[str]:
    """Yield the names of all fields that hold numbers."""
    if isinstance(content, dict):
        for inner, value in content.items():
            yield from numbers(value, inner)
    elif isinstance(content, list):
        for value in content:
            yield from numbers(value, name)
    elif isinstance(content, (int, float)) and not isinstance(content, bool):
        yield name


FIELDS = sorted(set(numbers(WHOLE.to_json())))


@each_case("value", EXTREMES)
def test_any_number_of_a_record_is_refused_or_compared(value: float) -> None:
    for places in ([name] for name in FIELDS):
        _check_extreme(places, value)
    _check_extreme(FIELDS, value)


def _check_extreme(places: list[str], value: float) -> None:
    try:
        record = probe_from(json.dumps(with_all(WHOLE.to_json(), value, places)))
    except ProbeError as error:
        assert len(str(error)) < 300, places
        return
    for before, after in ((record, WHOLE), (WHOLE, record)):
        assert all(len(line) < 200 for line in compared(before, after)), places
    calls = [("all_reduce", 1e6, 1.0), ("all_reduce", 0.0, 1.0)]
    for num_nodes in {law.num_nodes for law in record.laws}:
        term = transfer_term(record.laws, calls, num_nodes=num_nodes, transfer_ns=1e6)
        assert term is None or term.latency_ns >= 0, places


def test_rounds_without_time_are_refused() -> None:
    rows = [{**row, "rounds_ns": [1000.0, 0.0]} for row in RECORD.to_json()["sweep"]]
    with pytest.raises(ProbeError, match="a round took 0 ns"):
        probe_from(json.dumps({**RECORD.to_json(), "sweep": rows}))


def test_numbers_that_nothing_can_measure_are_compared_as_the_most_that_differs() -> None:
    assert interval(0.0, 1e9, 3.0) == (0.0, -20, 20)


def test_a_law_never_says_that_nothing_takes_no_time() -> None:
    law = replace(LAW, pieces=(replace(piece(0.0), latency_ns=-5000.0),))
    assert law.time_ns(8) == 1.0


@pytest.mark.parametrize("num_pieces", [7, 5000])
def test_a_law_of_many_pieces_is_refused_in_short_words(num_pieces: int) -> None:
    pieces = [{**LAW_JSON["pieces"][0], "from_bytes": float(number)} for number in range(num_pieces)]
    with pytest.raises(ProbeError, match=f"whose {num_pieces} pieces begin at") as raised:
        probe_from(json.dumps({**RECORD.to_json(), "laws": [{**LAW_JSON, "pieces": pieces}]}))
    assert len(str(raised.value)) < 300


def test_laws_of_many_numbers_of_nodes_are_named_in_short_words() -> None:
    laws = [law_of(number) for number in range(2, 1000)]
    words = no_law_of(laws, ["all_reduce"], 1 << 40)
    assert words.endswith("16, 17 and 982 more numbers of nodes, and none of 1099511627776")
    assert len(words) < 200


def test_a_number_of_nodes_that_no_float_holds_is_a_law_like_others() -> None:
    num_nodes = (1 << 53) + 1
    laws = [law_of(number) for number in (2, 4, num_nodes)]
    assert transfer_term(laws, [("all_reduce", 8.0, 1.0)], num_nodes=num_nodes, transfer_ns=1.0) is not None


def test_names_of_other_hosts_are_shown_short_and_printable() -> None:
    hosts = tuple(replace(host, name=f"\x1b[31m{number}" * 1000) for number, host in enumerate(RECORD.hosts * 500))
    with pytest.raises(ProbeError) as raised:
        check_comparable(replace(RECORD, hosts=hosts, cluster="\x1b]0;a\x07", device_name="b" * 10_000), RECORD)
    assert len(str(raised.value)) < 800
    assert str(raised.value).isprintable()


@each_case("part", ["{}", "[]", '{"a":1}', '""', "0", '[{"a":[]}]'])
def test_so_many_values_that_they_would_fill_the_memory_are_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.probe.record.MAX_BYTES", 1 << 16)
    text = json.dumps({**RECORD.to_json(), "unknown": 0}).replace(
        '"unknown": 0', f'"unknown": [{part}{f",{part}" * 2000}]'
    )
    with pytest.raises(ProbeError, match=r"it has \d+ values, more than 2048"):
        probe_from(text)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for name in ("fifo", "link", "huge"):
        with pytest.raises(ProbeError, match="cannot read the probe"):
            read_probe(tmp_path / name)
    with pytest.raises(ProbeError, match="cannot read the probe"):
        read_probe(Path("/dev/zero"))


LAW_JSON: dict[str, Any] = RECORD.to_json()["laws"][0]


def law_of(num_nodes: int) -> LatencyLaw:
    return replace(LAW, num_nodes=num_nodes)
