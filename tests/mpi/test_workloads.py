"""Evaluation, ResNet-18 and too little memory, each against a computation of the test's own."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import only_nightly
from torch.nn.functional import cross_entropy

from hpcpace.train.data import open_data
from hpcpace.train.models import build_gpt2, build_resnet
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig

PROGRAM = Path(__file__).with_name("workload_program.py")
TRAIN = ("-m", "hpcpace", "train")


def _found(mpiexec, n, *arguments):
    result = mpiexec(n, PROGRAM, *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("n", "meshes"),
    only_nightly([(4, ["dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2"])], [(2, ["dp=2", "pp=2", "tp=2"])]),
)
def test_perplexity_is_that_of_a_single_process_on_every_mesh(mpiexec, tmp_path, n, meshes):
    # With a learning rate of 0 the model is the one that it was at first.
    settings = {"steps": 2, "eval_every": 2, "eval_batches": 3, "learning_rate": 0.0, "seq_len": 32}
    plan = plan_training(TrainConfig(**settings, warmup_steps=0), 1)
    data, num_rows = open_data(plan), 3 * 8
    inputs, targets = data.held_out_batch(np.arange(num_rows) * data.num_held_out() // num_rows)
    with torch.no_grad():
        loss = build_gpt2(plan.shape, seed=0)(torch.from_numpy(inputs), torch.from_numpy(targets)).item()
    cases = {mesh: {"mesh": mesh, **settings} for mesh in meshes}
    if n == 2:
        cases["zero 3"] = {"zero": 3, **settings}
    for name, (evaluation,) in _found(mpiexec, n, "evaluations", tmp_path, json.dumps(cases)).items():
        assert evaluation["num_steps"] == 2, name
        assert evaluation["loss"] == pytest.approx(loss, rel=1e-5), name
        assert evaluation["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4), name


def _resnet_reference(num_replicas, *, batch_size, num_steps):
    """Train replicas side by side: each normalises its own part of the batch, and they average their gradients."""
    plan = plan_training(TrainConfig(model="resnet18", batch_size=batch_size), num_replicas)
    data = open_data(plan)
    replicas = [build_resnet(plan.shape, seed=0) for _ in range(num_replicas)]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in replica.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in replica.parameters() if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.95),
        )
        for replica in replicas
    ]
    losses = []
    for step in range(num_steps):
        images, labels = data.batch(step, seed=0, batch_size=batch_size, rows=slice(None))
        parts = (torch.from_numpy(array).chunk(num_replicas) for array in (images, labels))
        of_replicas = [cross_entropy(replica(x), y) for replica, x, y in zip(replicas, *parts, strict=True)]
        for loss in of_replicas:
            loss.backward()
        losses.append(sum(loss.item() for loss in of_replicas) / num_replicas)
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(dim=0)
            for parameter in parameters:
                parameter.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, replicas[0].eval(), data


def test_resnet18_trains_as_replicas_that_average_their_gradients(mpiexec, tmp_path):
    settings = {"model": "resnet18", "batch_size": 4, "steps": 3, "learning_rate": 1e-3}
    evaluated = {"eval_every": 3, "eval_batches": 4}
    for n in (1, 2):
        losses, model, data = _resnet_reference(n, batch_size=4, num_steps=3)
        found = _found(mpiexec, n, "losses", tmp_path / str(n), json.dumps({"run": {**settings, **evaluated}}))
        found_losses, (evaluation,) = found["run"]
        assert found_losses == pytest.approx(losses, rel=1e-3)
        images, labels = data.held_out_batch(np.arange(16) * data.num_held_out() // 16)
        with torch.no_grad():
            logits = model(torch.from_numpy(images))
        assert evaluation["accuracy"] == pytest.approx((logits.argmax(1).numpy() == labels).mean(), abs=1 / 16)
        assert evaluation["loss"] == pytest.approx(cross_entropy(logits, torch.from_numpy(labels)).item(), rel=1e-2)


@pytest.mark.nightly
def test_resnet18_learns_synthetic_images_and_says_that_they_are(python, tmp_path):
    arguments = ("--steps", 10, "--batch-size", 16, "--learning-rate", "0.002", "--eval-every", 10, "--no-trace")
    result = python(*TRAIN, "resnet18", *arguments, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "data: 4096 synthetic images" in result.stdout
    assert "images/s" in result.stdout
    attempt = tmp_path / "run" / "attempt-0"
    record, outcome = (json.loads((attempt / name).read_text()) for name in ("run.json", "result.json"))
    assert (record["data"]["synthetic"], record["model"]["num_parameters"]) == (True, 11_173_962)
    assert (record["samples_unit"], record["model"]["images_per_step"]) == ("images", 16)
    assert np.mean(outcome["losses"][-3:]) < 0.8 * outcome["losses"][0]
    assert outcome["evaluations"][0]["accuracy"] >= 0


def test_evaluations_and_checkpoints_are_marked_in_the_trace(python, tmp_path):
    from hpcpace.trace.reader import read_trace
    from hpcpace.trace.schema import Phase, StepFlag

    arguments = ("--steps", 6, "--warmup-steps", 1, "--seq-len", 16, "--eval-every", 2, "--checkpoint-every", 3)
    result = python(*TRAIN, "gpt2", *arguments, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    tables = read_trace(tmp_path / "run" / "attempt-0" / "trace" / "rank-00000.h5").tables
    steps, phases = tables["steps"], tables["phases"]
    for flag, phase, expected in (
        (StepFlag.EVAL, Phase.EVAL, [1, 3, 5]),
        (StepFlag.CHECKPOINT, Phase.CHECKPOINT, [2, 5]),
    ):
        assert np.asarray(steps["step"])[(np.asarray(steps["flags"]) & flag) != 0].tolist() == expected
        # Within a phase of the program, calls of modules and torch.save are rows as well.
        assert np.unique(np.asarray(phases["step"])[np.asarray(phases["phase"]) == phase]).tolist() == expected


@pytest.mark.nightly
def test_steps_of_a_trace_go_on_counting_after_a_stop(python, tmp_path):
    from hpcpace.trace.reader import read_trace
    from hpcpace.trace.schema import StepFlag

    arguments = ("--warmup-steps", 1, "--seq-len", 16, "--checkpoint-every", 3, "--run-dir", tmp_path / "run")
    for num_steps in (4, 6):
        result = python(*TRAIN, "gpt2", *arguments, "--steps", num_steps)
        assert result.returncode == 0, result.stderr
    steps = read_trace(tmp_path / "run" / "attempt-1" / "trace" / "rank-00000.h5").tables["steps"]
    assert np.asarray(steps["step"]).tolist() == [3, 4, 5]
    assert [bool(flag & StepFlag.WARMUP) for flag in np.asarray(steps["flags"])] == [True, False, False]


def test_peak_memory_of_each_rank_is_recorded(mpiexec, tmp_path):
    arguments = ("gpt2", "--steps", 2, "--warmup-steps", 0, "--no-trace", "--run-dir", tmp_path / "run")
    result = mpiexec(2, *TRAIN, *arguments)
    assert result.returncode == 0, result.stderr
    memory = json.loads((tmp_path / "run" / "attempt-0" / "result.json").read_text())["peak_memory"]
    assert [row["rank"] for row in memory] == [0, 1]
    # Torch alone takes more than 100 MB, and this model less than a GB.
    assert all(100e6 < row["rss_bytes"] < 1.5e9 for row in memory)


@pytest.mark.nightly
def test_too_little_memory_is_an_outcome_with_a_line_that_says_what_to_lower(python, tmp_path):
    arguments = ("gpt2", "--preset", "large", "--steps", "2", "--warmup-steps", "0", "--no-trace")
    limit_bytes = 3_500_000_000
    result = subprocess.run(
        [sys.executable, *TRAIN, *arguments, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
    )
    assert result.returncode == 4, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: rank 0 on ")
    assert "is out of memory after" in line
    assert "lower --batch-size (8) or --seq-len (1024)" in line
    outcome = json.loads((tmp_path / "run" / "attempt-0" / "result.json").read_text())
    assert outcome["outcome"] == "out of memory"
    assert outcome["peak_memory"][0]["rank"] == 0
    report = python("-m", "hpcpace", "report", tmp_path / "run")
    assert report.returncode == 2
    assert report.stderr.startswith("hpcpace: rank 0: out of memory (DefaultCPUAllocator: can't allocate memory")
