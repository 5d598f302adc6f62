"""Computation of a given time: what is waited, in which pieces, and what faults add to it."""

from __future__ import annotations

import pytest
import torch

from hpcpace.core.text import NS_PER_MS
from hpcpace.train.inject import Injector, parse_fault
from hpcpace.train.loop import Emulation, block_share
from hpcpace.train.models import autocast
from hpcpace.train.parallel import build_stage
from hpcpace.train.settings import GPT2_PRESETS, RESNET18, GPT2Shape, Mesh, ResNetShape

TEXT = GPT2Shape(num_layers=3, width=16, num_heads=2, context=8, vocabulary=32)
IMAGE = ResNetShape(widths=(4, 8), blocks_per_stage=2, num_classes=10)
ONE = Mesh(dp=1, pp=1, tp=1)


class FakeTime:
    """Clocks on which only sleep passes time, and each sleep may take too long."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns, self.late_ns = 0, late_ns
        self.slept_s: list[float] = []

    def clock(self) -> int:
        return self.now_ns

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_ns += round(duration_s * 1e9) + self.late_ns


def emulation(fake: FakeTime, compute_ms: float, shape: GPT2Shape | ResNetShape, mesh: Mesh = ONE) -> Emulation:
    return Emulation(compute_ms, shape, mesh, sleep=fake.sleep, wall_clock=fake.clock, processor_clock=lambda: 0)


def trained(found: Emulation, *, stage: int = 0, num_stages: int = 1, num_samples: int = 5) -> None:
    model = build_stage(TEXT, seed=0, stage=stage, num_stages=num_stages)
    for piece in model.pieces():
        found.attach(piece, is_head=piece is getattr(model, "head", None))
    tokens = torch.randint(0, TEXT.vocabulary, (num_samples, 8))
    inputs = tokens if stage == 0 else torch.randn(num_samples, 8, TEXT.width, requires_grad=True)
    model(inputs, tokens).sum().backward()


def test_all_samples_of_a_model_take_their_time() -> None:
    fake = FakeTime()
    trained(emulation(fake, 12.0, TEXT))
    assert fake.now_ns == pytest.approx(5 * 12 * NS_PER_MS, rel=1e-6)
    assert len(fake.slept_s) == 2 * (3 + 1)  # three blocks and the head, forward and backward
    assert sum(fake.slept_s[:4]) == pytest.approx(5 * 0.012 / 3, rel=1e-6)


def test_images_take_their_time() -> None:
    fake = FakeTime()
    model, found = build_stage(IMAGE, seed=0), emulation(fake, 12.0, IMAGE)
    for piece in model.pieces():
        found.attach(piece, is_head=False)
    model(torch.randn(6, 3, 32, 32), torch.zeros(6, dtype=torch.int64)).backward()
    assert fake.now_ns == pytest.approx(6 * 12 * NS_PER_MS, rel=1e-6)


def test_stages_share_the_time_of_the_whole_model() -> None:
    times_ns = []
    for stage in (0, 1):
        fake = FakeTime()
        trained(emulation(fake, 12.0, TEXT, Mesh(dp=1, pp=2, tp=1)), stage=stage, num_stages=2)
        times_ns.append(fake.now_ns)
    assert sum(times_ns) == pytest.approx(5 * 12 * NS_PER_MS, rel=1e-6)


def test_tensor_parallelism_cuts_the_time() -> None:
    fake = FakeTime()
    trained(emulation(fake, 12.0, TEXT, Mesh(dp=1, pp=1, tp=2)))
    assert fake.now_ns == pytest.approx(5 * 6 * NS_PER_MS, rel=1e-6)


def test_what_one_wait_takes_too_long_the_next_ones_lack() -> None:
    fake = FakeTime(late_ns=100_000)
    trained(emulation(fake, 12.0, TEXT))
    assert fake.now_ns == pytest.approx(5 * 12 * NS_PER_MS, abs=100_000)


def test_computation_that_takes_longer_than_it_is_given_is_an_overrun() -> None:
    found = Emulation(0.001, TEXT, ONE)
    trained(found)
    assert found.overrun > 1
    found.forget()
    assert found.overrun == 0
    exact = emulation(FakeTime(), 12.0, TEXT)
    trained(exact)
    assert exact.overrun == 0


def test_a_fault_is_a_share_of_the_emulated_time() -> None:
    fake = FakeTime()
    found = emulation(fake, 12.0, TEXT)
    injector = Injector(
        [parse_fault("rank=0,size=50%")], seed=0, rank=0, host="n1", clock=found.clock, spend=found.wait
    )
    model = build_stage(TEXT, seed=0)
    for piece in model.pieces():
        found.attach(piece, is_head=piece is getattr(model, "head", None))
    injector.attach(model.pieces())
    injector.begin_step(0)
    tokens = torch.randint(0, TEXT.vocabulary, (5, 8))
    model(tokens, tokens).backward()
    assert fake.now_ns == pytest.approx(1.5 * 5 * 12 * NS_PER_MS, rel=1e-6)


def test_bfloat16_computed_in_float32_is_the_same_but_for_rounding() -> None:
    tokens = torch.randint(0, TEXT.vocabulary, (5, 8), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for is_emulated in (False, True):
        model = build_stage(TEXT, seed=0)
        autocast(model, "bfloat16", torch.device("cpu"))
        if is_emulated:
            found = emulation(FakeTime(), 1.0, TEXT)
            for piece in model.pieces():
                found.attach(piece, is_head=piece is getattr(model, "head", None))
        loss = model(tokens, tokens)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(model.get_parameter("blocks.1.mlp.fc.weight").grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert torch.nn.functional.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0) > 0.999


@pytest.mark.parametrize("shape", [GPT2_PRESETS["small"], RESNET18], ids=["gpt2", "resnet18"])
def test_blocks_have_most_of_a_model_and_no_more(shape: GPT2Shape | ResNetShape) -> None:
    num = shape.num_layers if isinstance(shape, GPT2Shape) else 8
    assert 0.5 < num * block_share(shape) <= 1
