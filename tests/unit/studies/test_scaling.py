"""The scaling study: its runs, what is injected into them, the lab's network for each, and the table of verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.studies.jobs import FAULTS, ScalingFolder, ScalingRun, results, scaling_runs
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig

STATUS = {
    "hosts": [{"name": f"n{number}", "leaf": f"leaf{1 + number // 3}"} for number in range(1, 5)],
    "links": [
        *({"name": f"n{number}", "rate_bps": 200_000_000} for number in range(1, 5)),
        *({"name": f"leaf{number}", "rate_bps": 400_000_000} for number in (1, 2)),
    ],
}
RUN = ScalingRun(nodes=4, ranks_per_node=2)


def summary(mode: str, *, rate: float, findings: tuple[str, ...] = ()) -> str:
    content: dict[str, Any] = {
        "throughput": {"samples_per_s": rate, "p50_ns": 150e6, "cv": 0.1},
        "verdict": {"mode": mode, "headline": f"{mode}: so it is", "findings": [{"mode": name} for name in findings]},
    }
    return json.dumps(content)


def test_the_sweep_is_nodes_by_oversubscription_by_placement_and_one_node_once() -> None:
    runs = scaling_runs(nodes=(1, 2, 4), ranks_per_node=2, oversubscriptions=(1, 4))
    assert [run.name for run in runs] == [
        "n1x2-o1-block",
        *(
            f"n{nodes}x2-o{over}-{placement}"
            for nodes in (2, 4)
            for over in (1, 4)
            for placement in ("block", "cyclic")
        ),
    ]


def test_one_rank_a_node_has_one_placement() -> None:
    assert [run.placement for run in scaling_runs(nodes=(2, 4), ranks_per_node=1)] == ["block", "block"]


def test_each_fault_is_run_on_the_most_nodes() -> None:
    runs = scaling_runs(nodes=(1, 4), ranks_per_node=2, faults=tuple(FAULTS))
    assert [run.name for run in runs[3:]] == [f"n4x2-o1-block-{fault}" for fault in FAULTS]


@each_case("fault", ["none", *FAULTS])
@each_case("is_emulated", [False, True])
def test_every_run_has_a_plan(fault: str, is_emulated: bool) -> None:
    run = ScalingRun(nodes=4, ranks_per_node=2, fault=fault, is_emulated=is_emulated)
    words = run.training()
    options = list(zip(words[::2], words[1::2], strict=True))
    values = dict(options)
    specs = tuple(value for name, value in options if name == "--inject")
    settings = TrainConfig(mesh=values["--mesh"], steps=int(values["--steps"]), inject=specs, batch_size=32)
    plan = plan_training(settings, run.num_ranks)
    assert plan.mesh.pp == (2 if fault in ("slow-stage", "slow-link") else 1)
    assert len(plan.faults) == len(specs) >= (run.num_ranks if is_emulated else 0)


def test_the_lab_gets_the_uplinks_of_a_run() -> None:
    assert RUN.lab_faults(STATUS) == []
    oversubscribed = ScalingRun(nodes=4, ranks_per_node=2, oversubscription=4)
    assert oversubscribed.lab_faults(STATUS) == [
        ["slow-link", "leaf1", "--rate", "100000000bit"],
        ["slow-link", "leaf2", "--rate", "100000000bit"],
    ]


def test_the_lab_injects_what_is_of_the_network() -> None:
    link = ScalingRun(nodes=3, ranks_per_node=2, fault="slow-link")
    assert link.lab_faults(STATUS) == [["slow-link", "n3", "--rate", "20000000bit"]]
    traffic = ScalingRun(nodes=4, ranks_per_node=2, fault="traffic")
    assert traffic.lab_faults(STATUS) == [["traffic", "n1", "n4", "--streams", "4"]]


def test_refuses_a_lab_that_cannot_have_the_network() -> None:
    slow = {
        **STATUS,
        "links": [{**link, "rate_bps": 100_000_000} if "leaf" in link["name"] else link for link in STATUS["links"]],
    }
    with pytest.raises(UsageError, match="higher --uplink"):
        RUN.lab_faults(slow)
    with pytest.raises(UsageError, match="--hosts 8"):
        ScalingRun(nodes=8, ranks_per_node=2).lab_faults(STATUS)


def test_a_plan_grows_and_keeps_what_it_has(tmp_path: Path) -> None:
    study = ScalingFolder(tmp_path / "study")
    assert study.write_plan([RUN])
    other = ScalingRun(nodes=2, ranks_per_node=2)
    assert study.write_plan([other])
    assert not study.write_plan([other])
    assert study.runs() == [RUN, other]


@each_case("text", [None, "{", '{"schema": "other"}', '{"schema": "hpcpace-scaling-study/1", "runs": [{}]}'])
def test_refuses_what_is_no_scaling_study(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=r"scaling_study|plan\.json"):
        ScalingFolder(tmp_path).runs()


@each_case("values", [{"placement": "random"}, {"fault": "fire"}, {"oversubscription": 0.5}])
def test_refuses_a_run_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ScalingRun(nodes=2, ranks_per_node=2, **values)


def test_the_table_says_which_faults_were_found(tmp_path: Path) -> None:
    study = ScalingFolder(tmp_path)
    one, four = ScalingRun(nodes=1, ranks_per_node=2), ScalingRun(nodes=4, ranks_per_node=2)
    jitter = ScalingRun(nodes=4, ranks_per_node=2, fault="jitter")
    slow = ScalingRun(nodes=4, ranks_per_node=2, fault="straggler")
    undone = ScalingRun(nodes=2, ranks_per_node=2)
    study.write_plan([one, four, jitter, slow, undone])
    for run, text in (
        (one, summary("healthy", rate=100)),
        (four, summary("healthy", rate=300)),
        (jitter, summary("locality", rate=200, findings=("locality", "synchronisation amplification"))),
        (slow, summary("healthy", rate=300)),
    ):
        study.run_dir(run).path.mkdir(parents=True)
        study.run_dir(run).summary_json.write_text(text)
    found = results(study)
    assert [verdict.is_found for verdict in found] == [None, None, True, False]
    assert [verdict.efficiency for verdict in found] == [1, 0.75, 0.5, 0.75]
    assert study.open_runs() == [undone]
