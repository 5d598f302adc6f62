"""Compression and local SGD give the losses of their algorithms, computed here for two replicas by plain torch.

Everything is in float64, so that what is left between the two is far smaller than what an algorithm changes.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcpace.train.data import open_data
from hpcpace.train.models import build_gpt2
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import GPT2_PRESETS, TrainConfig

PROGRAM = Path(__file__).with_name("train_program.py")
STEPS, SEQ_LEN, BATCH_SIZE, LEARNING_RATE = 8, 32, 8, 3e-4
OUTER = "sync_every=3 outer_learning_rate=0.7"
ALGORITHMS = ["compress=fp16", "compress=bf16", "compress=int8", "compress=powersgd", "sync_every=3", OUTER]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def plain():
    return losses_of(lambda gradients, order: mean(gradients))


def test_two_replicas_have_the_losses_of_the_algorithm(mpiexec, tmp_path, plain):
    cases = {algorithm: f"dp=2 {algorithm} steps={STEPS} seq_len={SEQ_LEN}" for algorithm in ALGORITHMS}
    result = mpiexec(2, PROGRAM, "losses", tmp_path / "run", "float64", *cases.values())
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    expected = {
        "compress=fp16": losses_of(halves(torch.float16)),
        "compress=bf16": losses_of(halves(torch.bfloat16)),
        "compress=int8": losses_of(eight_bits),
        "compress=powersgd": losses_of(PowerSGD()),
        "sync_every=3": losses_of_local_sgd(3),
        OUTER: losses_of_local_sgd(3, outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)),
    }
    assert {a: found[case] for a, case in cases.items()} == {a: pytest.approx(expected[a], rel=1e-9) for a in cases}
    # None of them passes for training without it.
    assert [a for a, losses in expected.items() if losses == pytest.approx(plain, rel=1e-6)] == []


def losses_of(average):
    """Train one model on the average that an algorithm makes of two replicas' gradients.

    `average` maps a list of gradients of each replica, flat and in the order of DDP's one bucket, to their mean.
    """
    model = build_gpt2(GPT2_PRESETS["tiny"], seed=0, dtype=torch.float64)
    parameters, optimizer = list(model.parameters()), adamw(model)
    # DDP's bucket begins in the order of the model; after one step it follows that in which gradients are ready.
    order, ready, losses = parameters, [], []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready.append)
    for step in range(STEPS):
        gradients, step_losses = [], []
        for replica in range(2):
            ready.clear()
            model.zero_grad()
            loss = model(*batch(step, replica))
            loss.backward()
            gradients.append([p.grad.to_dense().clone() for p in order])
            step_losses.append(loss.item())
        for parameter, gradient in zip(order, average(gradients, order), strict=True):
            parameter.grad = gradient
        optimizer.step()
        order = list(ready)
        losses.append(np.mean(step_losses))
    return losses


def losses_of_local_sgd(every, outer=None):
    models = [build_gpt2(GPT2_PRESETS["tiny"], seed=0, dtype=torch.float64) for _ in range(2)]
    optimizers, losses = [adamw(model) for model in models], []
    kept = [p.detach().clone() for p in models[0].parameters()]
    outer = outer and outer(kept)
    for step in range(STEPS):
        step_losses = []
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss = model(*batch(step, replica))
            loss.backward()
            optimizer.step()
            step_losses.append(loss.item())
        losses.append(np.mean(step_losses))
        if step % every == every - 1:
            with torch.no_grad():
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    one.copy_((one + other) / 2)
                if outer:
                    for start, one in zip(kept, models[0].parameters(), strict=True):
                        start.grad = start - one
                    outer.step()
                    for start, one in zip(kept, models[0].parameters(), strict=True):
                        one.copy_(start)
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    other.copy_(one)
    return losses


def adamw(model):
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def batch(step, replica):
    rows = slice(replica * BATCH_SIZE // 2, (replica + 1) * BATCH_SIZE // 2)
    arrays = data().batch(step, seed=0, batch_size=BATCH_SIZE, rows=rows)
    return [torch.from_numpy(array) for array in arrays]


@cache
def data():
    return open_data(plan_training(TrainConfig(seq_len=SEQ_LEN), 1))


def mean(gradients):
    return [(one + other) / 2 for one, other in zip(*gradients, strict=True)]


def halves(dtype):
    def average(gradients, _):
        return [((one.to(dtype) / 2) + (other.to(dtype) / 2)).double() for one, other in zip(*gradients, strict=True)]

    return average


def eight_bits(gradients, _):
    """Average as ZeRO++ does (Wang et al. 2023, section 3.3), in blocks of 256: each replica averages a half."""
    shapes = [g.shape for g in gradients[0]]
    flat = [np.concatenate([g.numpy().ravel() for g in replica]).astype(np.float32) for replica in gradients]
    size = flat[0].size
    rounded = [rounded_in_blocks(np.pad(values, (0, -size % 512))) for values in flat]
    average = rounded_in_blocks((rounded[0] + rounded[1]) / np.float32(2))[:size]
    pieces = np.split(average.astype(np.float64), np.cumsum([shape.numel() for shape in shapes])[:-1])
    return [torch.from_numpy(piece.reshape(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def rounded_in_blocks(values):
    blocks = values.reshape(-1, 256)
    scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    return (np.rint(np.divide(blocks, scales, where=scales > 0, out=np.zeros_like(blocks))) * scales).ravel()


class PowerSGD:
    """Algorithm 1 of Vogels et al. 2019 with rank 4, from the third step on, with torch's random start."""

    def __init__(self):
        self.step, self.q, self.errors = 0, None, None

    def __call__(self, gradients, order):
        self.step += 1
        if self.step <= 2:
            return mean(gradients)
        matrices = [i for i, g in enumerate(gradients[0]) if g.dim() == 2 and sum(g.shape) * 4 * 2 < g.numel()]
        if self.q is None:
            self.q = self.random_start({i: gradients[0][i].shape for i in matrices})
            self.errors = [[torch.zeros_like(g) for g in replica] for replica in gradients]
        sent = [[g + e for g, e in zip(*both, strict=True)] for both in zip(gradients, self.errors, strict=True)]
        averages = mean(sent)
        for i in matrices:
            p = orthogonal(averages[i] @ orthogonal(self.q[i]))
            self.q[i] = averages[i].T @ p
            averages[i] = p @ self.q[i].T
        self.errors = [[s - a for s, a in zip(replica, averages, strict=True)] for replica in sent]
        return averages

    def random_start(self, shapes):
        # torch's hook draws for matrices of one shape after those of another.
        by_shape = sorted(shapes, key=lambda i: list(shapes.values()).index(shapes[i]))
        generator = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        return {i: torch.randn(1, shapes[i][1], 4, generator=generator, dtype=torch.float64)[0] for i in by_shape}


def orthogonal(matrix):
    return torch.linalg.qr(matrix)[0]
