"""Plots of runs whose truth is known, by what is on their axes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hpcpace
from experiments.synthetic_run import SyntheticRun
from hpcpace import plots as run_plots
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.frames.run import Run
from tests.device_run import DeviceRun

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "_slow$rank"
    return hpcpace.load(SyntheticRun(num_ranks=4, hosts=("n1", "n2"), slow={2: 1.5}, noise=0.02).write(path).path)


def test_the_slow_rank_is_the_dark_row(slow_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (image,) = hpcpace.plots.lateness(slow_rank).images
    shown = np.asarray(image.get_array())
    assert (shown.shape, int(shown.mean(axis=1).argmax())) == ((4, 38), 2)
    assert shown[2].mean() == pytest.approx(15, abs=1)
    monkeypatch.setattr(run_plots, "_MAX_COLUMNS", 10)
    (image,) = hpcpace.plots.lateness(slow_rank).images
    assert np.asarray(image.get_array()).shape == (4, 10)


def test_the_stack_is_as_high_as_the_mean_step(slow_rank: Run) -> None:
    axes = hpcpace.plots.parts(slow_rank)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "data", "forward", "backward", "optimizer", "wait", "transfer"
    ]  # fmt: skip
    top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
    assert top == pytest.approx(slow_rank.steps.duration_ns.max() / 1e6)


def test_a_step_is_a_lane_for_each_rank_with_the_slow_one_in_bold(slow_rank: Run) -> None:
    axes = hpcpace.plots.timeline(slow_rank, step=20)
    assert "step 20" in axes.get_xlabel()
    labels = [(label.get_text(), label.get_fontweight()) for label in axes.get_yticklabels()]
    assert labels == [("rank 0 n1", "normal"), ("rank 1 n1", "normal"), ("rank 2 n2", "bold"), ("rank 3 n2", "normal")]
    with pytest.raises(CannotTell, match="step 500 is none of the 38 used steps, 2 to 39"):
        hpcpace.plots.timeline(slow_rank, step=500)


def test_throughput_is_drawn_over_nodes_next_to_the_ideal(tmp_path: Path) -> None:
    for nodes in (1, 2, 4):
        hosts = tuple(f"n{number}" for number in range(nodes))
        SyntheticRun(num_ranks=4, hosts=hosts, samples_per_step=64 * nodes).write(tmp_path / f"run-{nodes}")
    rows = hpcpace.load_many(tmp_path)
    ideal, median, _ = hpcpace.plots.scaling(rows).lines
    assert np.allclose(ideal.get_ydata(), median.get_ydata())
    assert list(ideal.get_xdata()) == [1, 2, 4]
    with pytest.raises(CannotTell, match="no run has a throughput"):
        hpcpace.plots.scaling(rows.assign(num_nodes=0))


def test_what_is_not_known_is_not_drawn(tmp_path: Path) -> None:
    device = hpcpace.load(DeviceRun().write(tmp_path / "device").path, warns=False)
    for draw in (hpcpace.plots.lateness, hpcpace.plots.parts, hpcpace.plots.timeline):
        with pytest.raises(CannotTell, match="host times of ranks with a device"):
            draw(device)
    alone = hpcpace.load(SyntheticRun(num_ranks=1).write(tmp_path / "alone").path)
    with pytest.raises(CannotTell, match="no two ranks are known to do the same work"):
        hpcpace.plots.lateness(alone)


def test_without_matplotlib_the_package_is_named(slow_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for draw in (hpcpace.plots.lateness, hpcpace.plots.parts, hpcpace.plots.timeline):
        with pytest.raises(UsageError, match=r"pip install 'hpcpace\[analysis\]'"):
            draw(slow_rank)
