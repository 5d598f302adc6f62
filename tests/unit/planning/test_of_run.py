"""What traced runs say about a plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import hpcpace
from experiments.synthetic_run import BACKWARD_NS, FORWARD_NS, MS, OPTIMIZER_NS, Extra, SyntheticRun
from hpcpace.core.errors import CannotTell
from hpcpace.frames.run import Run
from hpcpace.planning.model import MeasuredModel, Transformer, preset
from hpcpace.planning.of_run import measure_run
from hpcpace.trace.schema import Phase
from library.volume import Operation
from tests.placed_run import PlacedRun, layout_operations

WORKLOAD = {
    "model": {
        "name": "gpt2", "preset": "tiny", "num_layers": 4, "width": 128, "num_heads": 4, "vocabulary": 256,
        "seq_len": 16, "dtype": "float32", "num_parameters": 842496,
    },
    "parallelism": {"microbatches": 4, "zero": 0, "overlap": True, "mesh": {"dp": 4, "pp": 1, "tp": 1}},
}  # fmt: skip


def _run(tmp_path: Path, record: object = None, **changes: object) -> Run:
    written = SyntheticRun(**changes).write(tmp_path / "run")
    if record is not None:
        written.attempts()[-1].run_json.write_text(json.dumps(record))
    return hpcpace.load(written.path, warns=False)


def test_a_script_is_known_by_what_its_ranks_compute_and_exchange(tmp_path: Path) -> None:
    found = measure_run(_run(tmp_path), None)
    model = found.job.model
    assert isinstance(model, MeasuredModel)
    samples = 64 / 4
    assert model.forward_s == pytest.approx(FORWARD_NS / 1e9 / samples, rel=0.01)
    assert model.backward_s == pytest.approx(BACKWARD_NS / 1e9 / samples, rel=0.01)
    assert model.update_s == pytest.approx(OPTIMIZER_NS / 1e9, rel=0.01)
    assert (found.nodes, found.batch, found.has_network) == (1, 64, False)
    assert found.layout.row(0) | {"dp": 4, "micro_batch": 16} == found.layout.row(0)
    # The prediction of the run itself, with what it does not explain, is the run.
    assert found.step_s == pytest.approx(0.036, rel=0.02) and 0.8 < found.correction < 1.3


def test_work_that_differs_in_single_steps_is_the_spread(tmp_path: Path) -> None:
    found = measure_run(_run(tmp_path, noise=0.1, num_steps=200, slow={1: 1.2}), None)
    work_ns = np.array([FORWARD_NS, BACKWARD_NS])
    whole_ns = work_ns.sum() * 1.05 + OPTIMIZER_NS  # with the slow rank
    assert found.spread == pytest.approx(0.1 * math.sqrt((work_ns**2).sum()) / whole_ns, rel=0.15)


def test_links_between_nodes_are_those_of_the_operations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.placed_run._COMPUTE_NS", 150 * MS)
    ring = [Operation("all_reduce", "gradients", (0, 1, 2, 3), 4_000_000, 4)]
    written = PlacedRun(operations=ring, host=np.array([0, 0, 1, 1]), leaves=[1, 1]).write(tmp_path / "run")
    run = hpcpace.load(written.path, warns=False)
    found = measure_run(run, None)
    (block,) = run.columns("collectives")
    assert found.has_network and found.nodes == 2
    # Two ranks of the ring on each of two nodes: one ring leaves a node.
    assert found.job.machine.network_rate == pytest.approx(np.asarray(block["bus_bytes_per_s"]).mean(), rel=0.05)


def test_small_operations_do_not_show_how_fast_a_link_is(tmp_path: Path) -> None:
    found = measure_run(_run(tmp_path, hosts=("n0", "n1")), None)
    assert (found.nodes, found.has_network) == (2, False)


def test_a_model_that_is_shared_out_must_be_known(tmp_path: Path) -> None:
    for kind in ("pp", "tp"):
        operations = layout_operations(2, 2, kind, large=4_000_000, small=1000)
        run = PlacedRun(operations=operations, host=np.array([0, 0, 1, 1]), leaves=[1, 1]).write(tmp_path / kind)
        with pytest.raises(CannotTell, match="share out a model that its record does not describe: name it with"):
            measure_run(hpcpace.load(run.path, warns=False), None)


def test_a_reference_workload_is_a_transformer(tmp_path: Path) -> None:
    found = measure_run(_run(tmp_path, WORKLOAD), None)
    model = found.job.model
    assert isinstance(model, Transformer)
    assert (model.name, model.hidden, found.batch) == ("gpt2-tiny", 128, 4)
    assert found.layout.row(0)["element_bytes"] == 4
    assert found.known.error is not None and found.known.error >= 0.18


def test_few_steps_and_what_is_not_recorded_are_said(tmp_path: Path) -> None:
    found = measure_run(_run(tmp_path / "short", num_steps=9), None)
    assert found.error is None and "7 used steps of the run: trace 8 or more to get intervals" in found.remarks
    assert any("whether gradients are exchanged while backward runs" in remark for remark in found.remarks)
    recorded = measure_run(_run(tmp_path / "recorded", WORKLOAD), None)
    assert recorded.error is not None and not any("backward runs" in remark for remark in recorded.remarks)


def test_what_a_run_does_not_explain_widens_the_interval(tmp_path: Path) -> None:
    plain = measure_run(_run(tmp_path / "plain"), None)
    # A straggler: the others wait, which no constant explains.
    idle = measure_run(_run(tmp_path / "idle", extras=(Extra(rank=0, length_ns=40 * MS, phase=Phase.DATA),)), None)
    assert plain.known.error == pytest.approx(0.181)
    assert idle.known.error == pytest.approx(math.log(idle.correction)) and idle.correction > 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missing": (2,)}, "rank 2 left no trace that can be used: trace all ranks"),
        ({"hosts": ("n0", "n1"), "clock_error_ns": {1: 5_000_000, 3: 5_000_000}}, "clocks of the run"),
        ({"samples_per_step": 0}, "how many samples"),
    ],
)
def test_runs_that_cannot_carry_a_plan_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CannotTell, match=message):
        measure_run(_run(tmp_path, **changes), None)


def test_a_model_that_the_run_did_not_train_is_refused(tmp_path: Path) -> None:
    model = preset("gpt2-small")
    with pytest.raises(CannotTell, match="trained gpt2-tiny, and not gpt2-small: drop"):
        measure_run(_run(tmp_path / "tiny", WORKLOAD), model)
    with pytest.raises(CannotTell, match="has 64 samples, which are no sequences of gpt2-small"):
        measure_run(_run(tmp_path / "samples"), model)
    with pytest.raises(CannotTell, match="its record names resnet18"):
        measure_run(_run(tmp_path / "images", {"model": {"name": "resnet18"}, "samples_unit": "images"}), model)


def test_what_is_not_explained_by_more_than_a_factor_is_no_plan(tmp_path: Path) -> None:
    stalled = (Extra(rank=0, length_ns=200 * MS, phase=Phase.DATA),)
    with pytest.raises(CannotTell, match="times what its computation and links explain"):
        measure_run(_run(tmp_path, extras=stalled), None)


def test_compression_and_local_steps_of_the_run_are_known(tmp_path: Path) -> None:
    parallelism = {**WORKLOAD["parallelism"], "compress": "fp16", "sync_every": 4}
    job = measure_run(_run(tmp_path, {**WORKLOAD, "parallelism": parallelism}), None).job
    assert (job.gradient_bytes, job.sync_every) == (2, 4)
    # Its steps are of two kinds.
    assert measure_run(_run(tmp_path / "local", {**WORKLOAD, "parallelism": parallelism}), None).known.error is None
    assert measure_run(_run(tmp_path / "plain", WORKLOAD), None).job.gradient_bytes == 4


def test_a_run_that_hung_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPCPACE_DIAGNOSIS_HANG_S", "1")
    with pytest.raises(CannotTell, match="the run hung"):
        measure_run(_run(tmp_path, hangs=True), None)


@pytest.mark.parametrize("content", ["", "[]", '{"model": '])
def test_a_record_that_cannot_be_read_is_said(tmp_path: Path, content: str) -> None:
    written = SyntheticRun().write(tmp_path / "run")
    written.attempts()[-1].run_json.write_text(content)
    with pytest.raises(CannotTell, match=r"what the run trained is not known: .*run\.json"):
        measure_run(hpcpace.load(written.path, warns=False), None)


@pytest.mark.parametrize(
    "model",
    [None, "mine", {"name": "mine", "layers": 3}, {"num_layers": -4}, {"width": "wide"}, {"num_layers": 1 << 60}],
)
def test_records_of_other_scripts_are_no_transformer(tmp_path: Path, model: object) -> None:
    assert isinstance(measure_run(_run(tmp_path, {"model": model, "parallelism": None}), None).job.model, MeasuredModel)
