"""What is decided before the studies run in the lab, and the document that they write."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from known_study import write_study

from experiments.pages import page, write_page, write_section
from experiments.studies.__main__ import PUBLISHED, busy_s, planned_study
from experiments.studies.document import PAGE, SCALING, TITLE, Measured, draw_plots, values_of
from experiments.studies.lab_set_up import SetUp, expected_step_s, lab_sweep, reference_text, set_up, steps_for
from hpcpace.core.errors import UsageError
from hpcpace.studies.setups import NanoCluster, Setup, model_size_setups, parse_layout
from library.figures import study_figures
from library.published import BATCH, IMAGE_GAIN, IMAGE_SCALING, IMAGES_PER_S, read_published

TEXT = reference_text()
SEQUENCE_MS = 60.0
WHEN = Measured(begin_s=1795391940.0, end_s=1795392600.0, busy_s={"nano-cluster": 600.0, "model-size": 60.0})


@pytest.fixture(scope="module")
def found() -> SetUp:
    return set_up(read_published(PUBLISHED), sequence_ms=SEQUENCE_MS)


def other(layout: str, parallelism: str, *, batch: int = BATCH) -> Setup:
    return dataclasses.replace(
        TEXT, layout=parse_layout(layout), parallelism=parallelism, batch=batch, compute_ms=SEQUENCE_MS
    )


def test_the_lab_has_the_ratios_of_the_published_set_ups(found: SetUp) -> None:
    for calibration in found.calibrations.values():
        assert calibration.lab.ratio == pytest.approx(calibration.published.ratio, rel=1e-3)
        assert calibration.lab.link_bps == found.link_bps
    assert found.calibrations["gpt2"].published.ratio == pytest.approx(7.16, abs=0.05)


def test_published_images_follow_from_the_three_figures_that_are_printed(found: SetUp) -> None:
    one = found.calibrations["resnet18"].published.samples_per_s_of_one
    assert 2 * IMAGE_SCALING * one * IMAGE_GAIN == pytest.approx(IMAGES_PER_S)


def test_computation_twice_as_slow_gets_a_link_twice_as_slow(found: SetUp) -> None:
    slow = set_up(read_published(PUBLISHED), sequence_ms=2 * SEQUENCE_MS)
    assert slow.link_bps == pytest.approx(found.link_bps / 2, rel=1e-3)
    assert slow.compute_ms["resnet18"] == pytest.approx(2 * found.compute_ms["resnet18"], rel=1e-3)


def test_the_formula_is_told_with_its_numbers(found: SetUp) -> None:
    text = "\n".join(found.lines())
    assert text.count("8 v n R1 / L") == 2
    assert f"{found.link_bps / 1e6:.2f} Mb/s = 7.16" in text


def test_a_larger_model_takes_longer_by_its_parameters(found: SetUp) -> None:
    times_ms = [found.emulated(setup).compute_ms or 0.0 for setup in model_size_setups(batch=16, shrink=16)[::2]]
    assert times_ms[0] == SEQUENCE_MS
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] == pytest.approx(SEQUENCE_MS * 6.14e6 / 0.493e6, rel=0.01)


def test_steps_are_as_many_as_take_the_time(found: SetUp) -> None:
    link_bps = found.link_bps
    assert steps_for(other("1x1", "none"), link_bps, 6.0) == round(6.0 / (BATCH * SEQUENCE_MS / 1e3))
    assert steps_for(other("1x1", "none", batch=1), link_bps, 6.0) == 20
    assert steps_for(other("2x1", "pipeline"), link_bps, 1.0) == 5
    assert steps_for(other("2x2", "tensor"), link_bps, 6.0) == 1


def test_a_step_takes_its_computation_and_its_communication(found: SetUp) -> None:
    alone_s = BATCH * SEQUENCE_MS / 1e3
    assert expected_step_s(other("1x1", "none"), found.link_bps) == pytest.approx(alone_s)
    assert expected_step_s(other("2x1", "data"), found.link_bps) == pytest.approx(8.16 * alone_s, rel=0.01)


def test_the_lab_sweeps_all_of_the_published_study() -> None:
    ours, theirs = lab_sweep().setups(), NanoCluster().setups()
    assert [(s.model, s.layout, s.parallelism, s.stands_for) for s in ours] == [
        (s.model, s.layout, s.parallelism, s.stands_for) for s in theirs
    ]


@pytest.mark.tool
def test_the_document_has_every_set_up_and_the_published_values(found: SetUp, tmp_path: Path) -> None:
    layouts = tuple(map(parse_layout, ("1x1", "1x2", "2x1")))
    sweep = NanoCluster(batches=(4, 16), image_batches=(32,), layouts=layouts, shrink=16)
    studies = {
        "nano-cluster": write_study(tmp_path / "nano", sweep.setups(), bytes_per_s=1_000_000),
        "model-size": write_study(tmp_path / "sizes", model_size_setups(batch=16, shrink=16), bytes_per_s=1_000_000),
    }
    figures = {name: study_figures(study)[0] for name, study in studies.items()}
    text = page(PAGE, **values_of(figures, found, published=read_published(PUBLISHED), when=WHEN))
    num_runs = [len(study.runs()) for study in studies.values()]
    assert (
        f"Measured by `make nano-cluster` on 2026-11-22 to 2026-11-23: {num_runs[0]} runs of the nano-cluster study in "
        f"10 minutes and {num_runs[1]} runs of the model-size study in 1 minutes; "
    ) in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 2x1 data")]
    assert rows[0][2] == "0.11"
    assert rows[0][4:7] == ["1.00", "1.00", "1.00, agrees"]
    assert len(rows) == 1 + 2 + 1  # beside the published value, over batches, of resnet18
    assert sum(line.startswith(("| small", "| medium", "| large", "| xl")) for line in text.splitlines()) == 4
    assert "network volume at 2x1, batch 16:" in text
    assert "forward computation of a microbatch of" in text
    assert text.index("## Set-up") < text.index("## Why the lab differs")
    draw_plots(studies, tmp_path / "studies-lab")
    plots = re.findall(r"\((studies-lab/[a-z_.]+)\)", text)
    assert sorted(plots) == sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "studies-lab").iterdir())


@pytest.mark.tool
def test_a_new_document_keeps_the_section_of_the_scaling_study(found: SetUp, tmp_path: Path) -> None:
    path = tmp_path / "studies-lab.md"
    write_section(PAGE, "## The scaling study\n\nMeasured.", path, title=TITLE)
    figures = {
        name: study_figures(write_study(tmp_path / name, setups, bytes_per_s=1_000_000))[0]
        for name, setups in (
            ("nano-cluster", [TEXT, other("1x1", "none")]),
            ("model-size", model_size_setups(batch=16, shrink=16)),
        )
    }
    values = values_of(figures, found, published=read_published(PUBLISHED), when=WHEN)
    write_page(PAGE, path, others=[SCALING], **values)
    text = path.read_text()
    assert "## Model sizes" in text
    assert text.endswith("\n\n## The scaling study\n\nMeasured.\n")


def test_a_stop_between_runs_does_not_count_as_time() -> None:
    assert busy_s([0.0, 10.0, 40.0, 4000.0, 4010.0]) == 50.0


def test_a_study_that_was_planned_for_another_link_is_not_gone_on_with(found: SetUp, tmp_path: Path) -> None:
    planned_study(tmp_path, "model-size", found, 1, 2.0)
    another = set_up(read_published(PUBLISHED), sequence_ms=2 * SEQUENCE_MS)
    with pytest.raises(UsageError, match="remove it, or name another"):
        planned_study(tmp_path, "model-size", another, 1, 2.0)
    assert len(planned_study(tmp_path, "model-size", found, 1, 2.0).runs()) == 8
