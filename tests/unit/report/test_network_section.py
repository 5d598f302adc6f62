"""What a report says and draws of the network."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from known_traffic import GIGABIT, MB, ring_job
from report_sample import SampleVerdict, sample_plots, sample_summary
from rich.console import Console

from hpcpace.core.rundir import json_text
from hpcpace.diagnosis.figures.network import NetworkEvidence, network_figures, network_plots
from hpcpace.diagnosis.network_summary import NetworkFigures
from hpcpace.report.drawing import MAX_UNITS as MAX_HOSTS
from hpcpace.report.html import compressed
from hpcpace.report.run_report import page
from hpcpace.report.sections.network import (
    MAX_LINES,
    MAX_ROWS,
    line_rate,
    network_drawn,
    network_notes,
    network_section,
    share,
)
from hpcpace.report.terminal import print_section

FOUR = ring_job(4, foreign={3: 47_500_000}, drops={1: 13}, slow={1: 0.95}, rate_source="tc")
MANY = ring_job(300, foreign={7: 400 * MB}, payload=300 * MB, line_rate_bps=10 * GIGABIT)


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed("window.Plotly = {};"))


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory):
    return sample_summary(tmp_path_factory.mktemp("run") / "run", hosts=("n0", "n1"), num_warmup=2)


def figures(job: NetworkEvidence) -> NetworkFigures:
    found = network_figures(job)
    assert found is not None
    return found


def printed(summary, job: NetworkEvidence, width: int = 80) -> str:
    stream = io.StringIO()
    section = network_section(replace(summary, network=network_figures(job)), None)
    print_section(Console(file=stream, width=width, highlight=False, color_system=None), section)
    return stream.getvalue()


def test_says_how_much_of_a_link_was_foreign_traffic() -> None:
    assert network_notes(figures(FOUR))[0] == (
        "38 % of the line rate of n4 eth0 was foreign traffic: it received 380 Mb/s that was not this job's"
    )


def test_says_what_foreign_traffic_may_be() -> None:
    (sentence,) = (note for note in network_notes(figures(FOUR)) if note.startswith("foreign:"))
    assert all(word in sentence for word in ("other jobs", "files", "checkpoints", "MPI"))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        pytest.param(FOUR, "n2 eth0 had 260 dropped frames, far more than the other hosts", id="drops of one host"),
        pytest.param(FOUR, "slowest pair: rank 1 on n2 to rank 2 on n3 with 253 Mb/s", id="a slow pair"),
        pytest.param(FOUR, "tc shapes what is sent", id="a rate by tc"),
        pytest.param(
            ring_job(2, line_rate_bps=0, rate_source=""),
            "the line rate of n1 eth0, n2 eth0 is not known (virtual interfaces report none)",
            id="no line rate",
        ),
        pytest.param(
            ring_job(2, has_flows=False),
            "foreign traffic is not known: the traces have no connections",
            id="old traces",
        ),
        pytest.param(
            ring_job(2, interface="mlx5_0/1"),
            "foreign traffic is not known: counters of RDMA do not say whose bytes",
            id="RDMA",
        ),
    ],
)
def test_says_what_stands_out_and_what_is_not_known(job: NetworkEvidence, words: str) -> None:
    assert any(words in note for note in network_notes(figures(job)))


def test_says_nothing_of_a_healthy_network_but_what_its_columns_mean() -> None:
    assert [note.partition(":")[0] for note in network_notes(figures(ring_job(8)))] == ["foreign"]


@pytest.mark.parametrize("job", [FOUR, MANY, ring_job(2, line_rate_bps=0, rate_source="")], ids=["4", "300", "no rate"])
def test_nothing_is_cut_at_80_columns(summary, job: NetworkEvidence) -> None:
    text = printed(summary, job)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_many_hosts_are_summed_up_with_the_worst_named(summary) -> None:
    text = printed(summary, MANY)
    assert len(text.splitlines()) < 30
    assert "n8 eth0" in text
    assert "median of 300" in text


def test_pairs_that_carry_next_to_nothing_are_not_shown(summary) -> None:
    found = figures(FOUR)
    little = replace(found.pairs[0], destination=0, bytes_per_step=1300.0, busy_share=1.0)
    network = replace(found, pairs=(little, *found.pairs), num_pairs=len(found.pairs) + 1)
    stream = io.StringIO()
    print_section(Console(file=stream, width=100), network_section(replace(summary, network=network), None))
    assert "1.30 kB" not in stream.getvalue()
    assert "the 4 of 5 pairs of ranks that send longest; the others carry little" in stream.getvalue()


def test_a_run_without_counters_has_no_section(summary) -> None:
    stream = io.StringIO()
    print_section(Console(file=stream), network_section(summary, None))
    assert stream.getvalue() == ""
    assert 'id="about-network"' not in page(summary, SampleVerdict(), sample_plots())


def on_page(summary, job: NetworkEvidence) -> str:
    found = network_figures(job)
    plots = replace(sample_plots(), network=network_plots(job, found))
    return page(replace(summary, network=found), SampleVerdict(), plots)


def test_the_page_has_the_section_with_its_plots_and_tables(summary) -> None:
    content = on_page(summary, FOUR)
    assert 'id="about-network"' in content
    for name in ("interfaces", "host-bytes", "host-rates"):
        assert f'id="{name}"' in content
    assert 'data-hosts="n2 n3"' in content


def test_names_of_hosts_and_interfaces_are_only_names(summary) -> None:
    found = figures(FOUR)
    row = replace(found.interfaces[0], host="<script>", interface="\x1b[2J")
    content = page(replace(summary, network=replace(found, interfaces=(row,))), SampleVerdict(), sample_plots())
    assert "<script> " not in content
    assert "\x1b" not in content


def test_plots_of_hundreds_of_hosts_are_thinned() -> None:
    drawn = network_drawn(network_plots(MANY, network_figures(MANY)))
    assert len({trace["yaxis"] for trace in drawn["interfaces"].traces}) == MAX_LINES
    assert len(drawn["interface_map"].traces[0]["y"]) <= MAX_ROWS
    assert len(drawn["host_bytes"].traces[0]["y"]) <= MAX_HOSTS
    assert "6 busiest of 300" in drawn["interfaces"].caption


def test_the_page_of_hundreds_of_hosts_stays_small(summary) -> None:
    assert len(on_page(summary, MANY)) - len(page(summary, SampleVerdict(), sample_plots())) < 400_000


def test_a_slow_pair_of_hosts_survives_thinning() -> None:
    job = ring_job(600, slow={77: 1.0}, num_seconds=4)
    (trace,) = network_drawn(network_plots(job, network_figures(job)))["host_rates"].traces
    assert trace["zmax"] > 700
    assert "slowest of 3 by 3 hosts" in network_drawn(network_plots(job, network_figures(job)))["host_rates"].caption


def test_the_summary_is_json_without_nan() -> None:
    content = json_text({"network": asdict(figures(FOUR))})
    assert "NaN" not in content
    assert json.loads(content)["network"]["interfaces"][0]["received"]["foreign_utilisation"] == pytest.approx(0.38)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 %"),
        (1e-7, "0 %"),
        (0.00024, "0.024 %"),
        (0.012, "1.2 %"),
        (0.06, "6 %"),
        (0.0996, "10 %"),
        (0.38, "38 %"),
    ],
)
def test_shares_have_two_digits(value: float | None, text: str) -> None:
    assert share(value) == text


def test_a_line_rate_has_a_mark_where_tc_set_it() -> None:
    row = figures(FOUR).interfaces[0]
    assert line_rate(row) == "1 Gb/s*"
    assert line_rate(replace(row, rate_source="device")) == "1 Gb/s"
    assert line_rate(replace(row, line_rate_bps=None)) == "?"
    assert line_rate(replace(row, line_rate_bps=2_500_000_000, rate_source="device")) == "2.50 Gb/s"


def test_intervals_without_a_sample_leave_gaps_in_the_lines() -> None:
    job = ring_job(4)
    job.loads.total_bytes[:, 0, 5:8] = np.nan
    plots = network_plots(job, network_figures(job))
    content = json.dumps([trace["y"] for trace in network_drawn(plots)["interfaces"].traces])
    assert "NaN" not in content
    assert "null" in content
