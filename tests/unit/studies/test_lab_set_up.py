"""What is decided before the studies run in the lab, and the document that they write."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from known_study import write_study

from experiments.studies.__main__ import busy_s, lab_sweep, planned_study, published_rows, reference_set_up
from experiments.studies.document import Measured, document, draw_plots, write_document, write_scaling
from experiments.studies.lab_set_up import SetUp, set_up, single, steps_for
from hpcpace.core.errors import UsageError
from hpcpace.studies.figures import study_figures
from hpcpace.studies.published import BATCH
from hpcpace.studies.setups import NanoCluster, Setup, model_size_setups, parse_layout

TEXT = dataclasses.replace(lab_sweep().setups()[0], batch=BATCH, stands_for=BATCH)
WHEN = Measured(begin_s=1795391940.0, end_s=1795392600.0, busy_s={"nano-cluster": 600.0, "model-size": 60.0})
SINGLE = {"gpt2": 2500.0, "resnet18": 240.0}


@pytest.fixture(scope="module")
def found() -> SetUp:
    return set_up(reference_set_up(TEXT), published_rows(), quota=0.4, samples_per_s_of_one=SINGLE)


def other(layout: str, parallelism: str) -> Setup:
    return dataclasses.replace(TEXT, layout=parse_layout(layout), parallelism=parallelism)


def test_the_lab_has_the_ratio_of_the_published_set_up(found: SetUp) -> None:
    assert found.lab.ratio == pytest.approx(found.published.ratio, rel=1e-3)
    assert found.published.ratio == pytest.approx(7.16, abs=0.05)


def test_a_rank_twice_as_fast_gets_a_link_twice_as_fast(found: SetUp) -> None:
    fast = {model: 2 * rate for model, rate in SINGLE.items()}
    other_found = set_up(reference_set_up(TEXT), published_rows(), quota=0.4, samples_per_s_of_one=fast)
    assert other_found.lab.link_bps == pytest.approx(2 * found.lab.link_bps, rel=1e-3)


def test_the_formula_is_told_with_its_numbers(found: SetUp) -> None:
    text = "\n".join(found.lines())
    assert "8 v n R1 / L" in text
    assert f"{found.lab.link_bps / 1e6:.2f} Mb/s" in text
    assert "0.4 cores per rank" in text


def test_steps_are_as_many_as_take_the_time(found: SetUp) -> None:
    facts = found.facts()
    assert steps_for(other("1x1", "none"), facts, 3.0) == round(3.0 / (BATCH * 64 / 2500))
    assert steps_for(dataclasses.replace(TEXT, batch=1), facts, 3.0) == 20
    assert steps_for(other("2x1", "data"), facts, 1.0) == 2
    assert steps_for(other("2x2", "tensor"), facts, 3.0) == 1


def test_a_single_rank_does_what_a_replica_does() -> None:
    alone = single(other("2x2", "data"), steps=5)
    assert (alone.name, alone.steps, alone.warmup_steps) == ("gpt2-small-1x1-none-b16", 6, 1)
    assert (alone.batch, alone.shrink) == (TEXT.batch, TEXT.shrink)


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
    text = document(figures, found, published=published_rows(), when=WHEN)
    num_runs = [len(study.runs()) for study in studies.values()]
    assert (
        f"Measured by `make nano-cluster` on 2026-11-22 to 2026-11-23: {num_runs[0]} runs of the nano-cluster study in "
        f"10 minutes and {num_runs[1]} runs of the model-size study in 1 minutes; "
    ) in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 2x1 data")]
    assert rows[0][2:5] == ["0.11", "1.00", "1.00"]
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
    write_scaling(path, "## The scaling study\n\nMeasured.")
    figures = {
        name: study_figures(write_study(tmp_path / name, setups, bytes_per_s=1_000_000))[0]
        for name, setups in (
            ("nano-cluster", [reference_set_up(TEXT), single(TEXT, steps=5)]),
            ("model-size", model_size_setups(batch=16, shrink=16)),
        )
    }
    write_document(path, figures, found, published=published_rows(), when=WHEN)
    text = path.read_text()
    assert "## Model sizes" in text
    assert text.endswith("\n\n## The scaling study\n\nMeasured.\n")


def test_a_stop_between_runs_does_not_count_as_time() -> None:
    assert busy_s([0.0, 10.0, 40.0, 4000.0, 4010.0]) == 50.0


def test_a_study_that_was_planned_for_another_link_is_not_gone_on_with(found: SetUp, tmp_path: Path) -> None:
    planned_study(tmp_path, "model-size", found, 1, 2.0)
    fast = {model: 2 * rate for model, rate in SINGLE.items()}
    another = set_up(reference_set_up(TEXT), published_rows(), quota=0.4, samples_per_s_of_one=fast)
    with pytest.raises(UsageError, match="remove it, or name another"):
        planned_study(tmp_path, "model-size", another, 1, 2.0)
    assert len(planned_study(tmp_path, "model-size", found, 1, 2.0).runs()) == 8
