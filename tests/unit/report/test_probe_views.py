"""How a probe is shown: lines that fit a terminal, and a page that says the same."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import each_case
from probe_sample import made_copies, made_finding, made_noise, made_pairs, made_probe
from rich.console import Console

from hpcpace.probe.changes import changes, outcome_words
from hpcpace.probe.pair_network import late_pairs
from hpcpace.probe.record import PairRow, PairsRecord, ProbeRecord
from hpcpace.report.html import html_page
from hpcpace.report.sections.communication import size_words
from hpcpace.report.sections.probe import pairs_map, probe_document
from hpcpace.report.terminal import print_document

NASTY = "<script>alert(1)</script>\x1b[31m"


def probe_lines(record: ProbeRecord, **more: Any) -> list[str]:
    stream = io.StringIO()
    print_document(Console(file=stream, width=80, highlight=False, color_system=None), probe_document(record, **more))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def probe_page(record: ProbeRecord) -> str:
    return html_page(probe_document(record))


def test_lines_fit_80_columns_and_say_what_the_link_allows() -> None:
    lines = probe_lines(made_probe())
    assert max(map(len, lines)) <= 80
    assert lines[1] == "hpcpace probe of 4 hosts, 4 ranks: gloo on CPUs, 59 s"
    assert "network    n1, n2, n3, n4: eth0, 10 Gb/s" in lines
    assert any(re.match(r"all_reduce +4 +4 +\d+ us +4 MiB +1.07 GB/s +86 %$", line) for line in lines)


def test_the_table_of_all_hosts_has_the_columns_of_nccl_tests_and_quantiles() -> None:
    lines = probe_lines(made_probe())
    at = lines.index("all_reduce, 4 hosts, 4 ranks")
    heads = " ".join(lines[at + 1 : at + 3]).split()
    assert sorted(heads) == ["algbw", "busbw", "limit", "of", "p95", "p99", "size", "time", "times"]
    assert lines[at + 3].split()[:2] == ["64", "B"]


def test_changes_begin_with_the_outcome() -> None:
    found = changes(made_probe(), made_probe(slowdown=1.5, seed=1))
    lines = probe_lines(made_probe(), changes=found, outcome=outcome_words(found))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("all_reduce") and "slower: time +" in line for line in lines)
    assert lines[2].startswith("Change     slower: all_reduce over")


def test_problems_are_shown_and_names_cannot_control_the_terminal() -> None:
    record = made_probe(hosts=("n1", NASTY), problems=(NASTY,))
    text = "\n".join(probe_lines(record))
    assert "\x1b" not in text and "problem    <script>" in text


@each_case("values", [{}, {"sweep": (), "laws": (), "skews": ()}, {"laws": ()}, {"lost_hosts": ("n3",)}])
def test_the_page_holds_the_whole_probe_and_nothing_that_a_name_says(values: dict[str, object]) -> None:
    record = made_probe(hosts=("n1", NASTY, "n3"), problems=(NASTY,), **values)
    page = probe_page(record)
    assert "<script>alert" not in page
    assert "default-src 'none'" in page
    assert record.lost_hosts == () or "n3 stopped answering" in page


def test_the_page_draws_a_law_for_each_number_of_hosts_and_the_limit() -> None:
    found = re.search(r'id="plot-data">(.*?)</script>', probe_page(made_probe()), re.DOTALL)
    assert found is not None
    plots = json.loads(found[1])
    assert [len(plot["traces"]) for plot in plots.values()] == [4, 4, 4, 4]
    assert plots["probe-rates"]["traces"][-1]["y"] == [1.25, 1.25]


def test_the_page_of_a_host_without_a_speed_has_no_limit() -> None:
    record = made_probe()
    record = replace(record, sweep=tuple(replace(row, limit=None) for row in record.sweep))
    assert "Dashed" not in probe_page(record) and "86 %" not in "\n".join(probe_lines(record))


@each_case(("size", "words"), [(64, "64 B"), (4096, "4 KiB"), (1048572, "1 MiB"), (1 << 32, "4 GiB")])
def test_sizes_are_powers_of_two(size: int, words: str) -> None:
    assert size_words(size) == words


def test_the_page_has_pairs_noise_and_copies_in_the_words_of_the_terminal() -> None:
    sentence = "n3's link sends at 4 Gb/s of the usual 9.4 Gb/s"
    record = made_probe(
        pairs=made_pairs(findings=(made_finding(sentence),)),
        noise=made_noise(robbed={("n1", 2): 0.05}),
        copies=made_copies(),
    )
    page, text = html.unescape(probe_page(record)), "\n".join(probe_lines(record))
    for words in (sentence, "a link usually carries 9.44 Gb/s, 94.4 % of the line rate, latency 20.0 us", "5.1 %"):
        assert words in page and words in text
    for title in ("Pairs of hosts", "Noise of cores", "Copies"):
        assert f">{title}</h2>" in page


def test_a_part_that_was_not_measured_has_no_section() -> None:
    page = probe_page(made_probe())
    assert not any(f">{title}</h2>" in page for title in ("Pairs of hosts", "Noise of cores", "Copies"))


def test_the_map_of_pairs_has_a_row_for_each_host_and_no_value_for_itself() -> None:
    drawn = pairs_map(made_pairs(slow={("n1", "n3"): 0.2}))
    cells = drawn.traces[0]["packed"]
    rates = np.frombuffer(base64.b64decode(cells["bytes"]), np.int8).reshape(-1, cells["columns"])
    assert drawn.traces[0]["y"] == ["n1", "n2", "n3", "n4"]
    assert (np.diag(rates) == -128).all()
    assert np.unravel_index(np.where(rates > 0, rates, 127).argmin(), rates.shape) == (0, 2)


@pytest.mark.parametrize("hosts", [(), ("n1", "n2")])
def test_fewer_than_three_hosts_have_no_map(hosts: tuple[str, ...]) -> None:
    assert pairs_map(made_pairs(hosts=hosts)) is None


def test_names_of_hosts_cannot_control_any_section() -> None:
    hosts = ("n1", NASTY, "n3")
    record = made_probe(pairs=made_pairs(hosts=hosts), noise=made_noise(hosts=hosts), copies=made_copies(hosts=hosts))
    page = probe_page(record)
    assert "<script>alert" not in page and "\x1b" not in page


def test_pairs_without_a_result_name_the_problem() -> None:
    row = PairRow(first="n1", second="n3", is_apart=True, forward=None, backward=None, problem="n1: no route to host")
    pairs = PairsRecord(carrier="TCP over eth0", rows=(row,))
    assert "n1: no route to host" in probe_page(made_probe(pairs=pairs))


def test_a_latency_that_stands_out_is_named_and_its_rounds_are_one_pair() -> None:
    late = late_pairs(made_pairs(late={("n2", "n3"): 3.0}).rows)
    assert [(row.first, row.second) for row in late] == [("n2", "n3")]
    assert late_pairs(made_pairs().rows) == []


def test_latencies_that_differ_by_less_than_5_us_do_not_stand_out() -> None:
    assert late_pairs(made_pairs(late={("n2", "n3"): 1.2}).rows) == []


def test_the_noise_of_cores_is_not_explained_as_that_of_a_run() -> None:
    assert "#term-noise" not in probe_page(made_probe(noise=made_noise()))
