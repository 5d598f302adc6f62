"""The section of the scaling study in the document of the lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.pages import write_section
from experiments.studies.document import PAGE, TITLE, section
from hpcpace.studies.jobs import ScalingFolder, ScalingRun, results


def a_study(path: Path) -> ScalingFolder:
    study = ScalingFolder(path)
    healthy = ScalingRun(nodes=4, ranks_per_node=1, is_emulated=True)
    faulty = [ScalingRun(nodes=4, ranks_per_node=1, fault=fault, is_emulated=True) for fault in ("jitter", "traffic")]
    study.write_plan([healthy, *faulty])
    for run in study.runs():
        mode = "synchronisation amplification" if run.fault == "jitter" else "healthy"
        study.run_dir(run).path.mkdir()
        study.run_dir(run).summary_json.write_text(
            json.dumps(
                {
                    "throughput": {"samples_per_s": 1000.0, "p50_ns": 150e6, "cv": 0.1},
                    "verdict": {"mode": mode, "headline": "so | it is", "findings": []},
                }
            )
        )
    return study


@pytest.mark.tool
def test_the_section_says_what_was_injected_and_whether_it_was_found(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    text = section(study.path, results(study))
    assert "The reports have 1 of 2 injected failure modes among their findings. In 1 of them, the same run" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| n4")]
    assert [(row[1], row[-1].strip("| ")) for row in rows] == [
        ("", "so / it is"),
        ("jitter", "synchronisation amplification"),
        ("traffic", "none"),
    ]


def test_the_section_takes_the_place_of_an_earlier_one_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "studies-lab.md"
    path.write_text("# The studies in the lab\n\nOf the nano-cluster.\n")
    for word in ("first", "second"):
        write_section(PAGE, f"## The scaling study\n\nThe {word}.", path, title=TITLE)
    assert path.read_text() == (
        "# The studies in the lab\n\nOf the nano-cluster.\n\n## The scaling study\n\nThe second.\n"
    )
