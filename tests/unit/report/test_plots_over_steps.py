"""The plots of phases over steps, of cores and of bandwidths: what they add up to, leave out and say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from report_sample import sample_core_times, sample_plots, sample_summary

from hpcpace.diagnosis.plot_data import Bandwidth, PlotData
from hpcpace.metrics.phases import Part
from hpcpace.report.document import PAGE, TERMINAL
from hpcpace.report.run_report import run_document
from hpcpace.report.sections.communication import bandwidth_plot, bandwidth_table
from hpcpace.report.sections.hosts import times_by_phase, waiting_by_rank
from hpcpace.report.sections.steps import phases_over_steps, times_section

NEW = {"phases-over-steps", "core-phases", "core-ranks", "bandwidths"}
ONE = Bandwidth(op="all_reduce", group_size=4, size_bytes=1 << 20, low=1e8, median=2e8, high=4e8, bus_factor=1.5)


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory):
    return sample_summary(tmp_path_factory.mktemp("run") / "run", hosts=("n0", "n1"), num_warmup=2)


def parts_ms(num_steps: int) -> dict[str, np.ndarray | None]:
    made: dict[str, np.ndarray | None] = {part.name.lower(): np.zeros(num_steps) for part in Part}
    return made | {"forward": np.arange(num_steps) + 1.0, "wait": np.full(num_steps, 2.0)}


def test_areas_add_up_to_the_steps() -> None:
    plot = phases_over_steps(np.arange(5, 8), parts_ms(3))
    assert [trace["name"] for trace in plot.traces] == ["forward", "wait"]
    assert np.sum([trace["y"] for trace in plot.traces], axis=0).tolist() == [3.0, 4.0, 5.0]
    assert plot.traces[0]["x"] == [5, 6, 7]


@pytest.mark.parametrize("num_steps", [800, 1001, 10_000])
def test_many_steps_are_means_of_neighbours_and_the_caption_says_so(num_steps: int) -> None:
    plot = phases_over_steps(np.arange(num_steps), parts_ms(num_steps))
    (forward, wait) = (trace["y"] for trace in plot.traces)
    size = -(-num_steps // 400)
    assert len(forward) <= 400
    assert forward[0] == pytest.approx((size + 1) / 2, rel=1e-3) and set(wait) == {2.0}
    assert f"mean of {size} steps" in plot.caption


def test_waits_that_are_not_known_are_drawn_with_the_transfers() -> None:
    unknown = parts_ms(3) | {"wait": None, "sync_wait": None, "transfer": np.ones(3)}
    assert [trace["name"] for trace in phases_over_steps(np.arange(3), unknown).traces] == [
        "forward",
        "wait or transfer",
    ]


def test_a_single_step_has_no_areas(summary) -> None:
    plots = PlotData(step=np.arange(1), step_ms=np.ones(1), parts_ms=parts_ms(1))
    assert not [block for block in times_section(summary, plots).content if getattr(block, "name", "") in NEW]


def test_own_work_by_phase_is_the_mean_of_the_ranks() -> None:
    plot = times_by_phase(sample_core_times(("n0", "n0", "n1")))
    found = {trace["name"]: trace["x"] for trace in plot.traces}
    assert found == {
        "running on a core": [10.0, 0.0],
        "ready, without a core": [1.0, 0.0],
        "not known": [0.0, 20.0],
    }


def test_phases_without_own_work_are_left_out() -> None:
    times = sample_core_times(("n0", "n0"))
    assert times_by_phase(replace(times, unknown_ms=np.zeros((2, 2)))).traces[0]["y"] == ["forward"]


def test_the_ranks_that_wait_longest_are_drawn_of_many() -> None:
    (plot,) = waiting_by_rank(sample_core_times(("n0",) * 100), named=[99])
    names = plot.traces[0]["y"]
    assert len(names) == 24 and names[0].startswith("99 n0 ") and names[1] == "98 n0"
    assert "24 of 100 ranks" in plot.caption and plot.rows[0][1:] == ("99", "n0")


@pytest.mark.parametrize(("hosts", "factor"), [(("n0",), 1.0), (("n0", "n0"), 0.0)])
def test_one_rank_and_ranks_that_do_not_wait_are_not_drawn_one_by_one(hosts: tuple[str, ...], factor: float) -> None:
    times = sample_core_times(hosts)
    assert not list(waiting_by_rank(replace(times, queued_ms=factor * times.queued_ms)))


def test_bandwidths_are_in_a_plot_and_in_figures() -> None:
    plot, table = bandwidth_plot([ONE]), bandwidth_table([ONE])
    assert [trace["x"] for trace in plot.traces] == [[0.2], [0.3]]
    assert plot.traces[0]["error_x"]["array"] == [0.2] and "error_x" not in plot.traces[1]
    assert table.rows == [("all_reduce", "4", "1.05 MB", "0.1 GB/s", "0.2 GB/s", "0.4 GB/s", "0.3 GB/s")]
    assert plot.layout["xaxis"]["ticktext"] == ["100 MB/s", "1 GB/s"]


def test_an_operation_without_a_bus_bandwidth_has_none() -> None:
    plain = replace(ONE, op="op 99", bus_factor=None)
    assert bandwidth_plot([plain]).traces[1]["x"] == [None]
    assert bandwidth_table([plain]).rows[0][-1] == "-"


def test_the_largest_of_many_kinds_are_drawn_and_all_are_in_figures() -> None:
    many = [replace(ONE, size_bytes=1 << power) for power in range(4, 34)]
    plot = bandwidth_plot(many)
    assert len(plot.traces[0]["y"]) == 16 and "16 of 30 kinds" in plot.caption
    assert len(bandwidth_table(many).rows) == 30


def test_a_page_has_them_and_a_terminal_does_not(summary) -> None:
    document = run_document(summary, summary.verdict, sample_plots())
    assert {plot.name for plot in document.plots()} >= NEW
    (cores,) = (section for section in document.sections if section.title == "Cores")
    assert cores.on(PAGE) and not cores.on(TERMINAL) and not cores.lead


def test_what_is_not_drawn_is_said(summary) -> None:
    document = run_document(summary, summary.verdict, PlotData())
    assert not NEW & {plot.name for plot in document.plots()}
    said = str(document.sections[-1].content)
    assert all(f"no plot of {what}" in said for what in ("phases over steps", "times on and off a core", "bandwidths"))
