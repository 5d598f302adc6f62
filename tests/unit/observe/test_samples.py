"""The samples of each step are those of the batches that its modules got, whatever its loaders fetch ahead."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcpace.observe.training_calls import BatchSizes

_MODULE = torch.nn.ReLU()


class _Loader:
    """What a DataLoader's iterator is to the count: something that is alive or not."""


def _steps(work: Iterable[Iterable[tuple[str, int]]], loaders: dict[str, _Loader]) -> list[int]:
    """Return the samples of each step: of forward passes (a teacher's, on meta), ends of iterators, fetches."""
    sizes, counts = BatchSizes(), []
    for step in work:
        for what, size in step:
            if what == "forward":
                sizes.forwarded(_MODULE, (torch.zeros(size, 2),), {})
            elif what == "on meta":
                sizes.forwarded(_MODULE, (torch.zeros(size, 2, device="meta"),), {})
                sizes.backward_ended()
            elif what == "teacher":
                sizes.evaluated()
            elif what.startswith("drop "):
                del loaders[what.removeprefix("drop ")]
            else:
                sizes.fetched(torch.zeros(size, 2), loaders.setdefault(what, _Loader()))
        sizes.backward_ended()
        counts.append(sizes.take())
    return counts


_FETCH, _FORWARD = ("train", 8), ("forward", 8)


@each_case(
    ("work", "counts"),
    [
        pytest.param([[_FETCH, _FORWARD]] * 3, [8, 8, 8], id="one batch a step"),
        pytest.param(
            [[_FETCH, _FETCH, _FORWARD], [_FETCH, _FORWARD], [("train", 3), _FORWARD], [("forward", 3)]],
            [8, 8, 8, 3],
            id="fetched one ahead, the last smaller",
        ),
        pytest.param([[_FETCH] * 3 + [_FORWARD] * 2] + [[_FETCH, _FORWARD] * 2] * 2, [16, 16, 16], id="microbatches"),
        pytest.param([[_FETCH, *[("forward", 2)] * 4]] * 2, [8, 8], id="a batch split into microbatches"),
        pytest.param([[_FETCH, ("other", 8), ("forward", 16)]] * 2, [16, 16], id="two loaders joined"),
        pytest.param([[_FETCH, ("teacher", 0), _FORWARD]] * 3, [8, 8, 8], id="a teacher sees the batch first"),
        pytest.param(
            [[("probe", 8), ("drop probe", 0), _FETCH, _FORWARD], [_FETCH, _FORWARD], [_FETCH, _FORWARD]],
            [8, 8, 8],
            id="a batch fetched for its shape alone",
        ),
        pytest.param([[("train", 8), ("drop train", 0), _FORWARD]] * 3, [8, 8, 8], id="an iterator for each batch"),
        pytest.param(
            [[_FETCH, ("teacher", 0)] * 3 + [_FORWARD] * 3] * 2, [24, 24], id="all microbatches without gradients first"
        ),
        pytest.param(
            [[("valid", 8), ("teacher", 0)] * 4 + [_FETCH, ("teacher", 0), _FETCH, ("teacher", 0), _FORWARD, _FORWARD]],
            [16],
            id="the same, behind an evaluation whose iterator stays",
        ),
        pytest.param(
            [[("valid", 8), ("teacher", 0)] * 4 + [_FETCH, _FORWARD, _FORWARD]],
            [8],
            id="a model called twice, behind an evaluation whose iterator stays",
        ),
        pytest.param(
            [[("valid", 8), ("teacher", 0), ("on meta", 8), _FETCH, _FORWARD], [_FETCH, _FORWARD]],
            [8, 8],
            id="operations counted on the meta device, behind an evaluation whose iterator stays",
        ),
        pytest.param(
            [[("valid", 8), ("teacher", 0), ("valid", 8), ("drop valid", 0), ("on meta", 8), _FETCH, _FORWARD]],
            [8],
            id="operations counted on the meta device, behind an evaluation that gives up a batch",
        ),
        pytest.param([[("on meta", 8), _FORWARD]], [8], id="operations counted on the meta device, without a loader"),
        pytest.param(
            [
                [_FETCH, _FORWARD],
                [("valid", 8), ("teacher", 0), ("valid", 8), ("teacher", 0), ("drop valid", 0), _FETCH, _FORWARD],
                [_FETCH, _FORWARD],
            ],
            [8, 8, 8],
            id="an evaluation between steps",
        ),
        pytest.param(
            [
                [_FETCH, _FETCH, _FORWARD],
                [("valid", 8), ("teacher", 0), ("drop valid", 0), _FETCH, _FORWARD],
                [_FORWARD],
            ],
            [8, 8, 8],
            id="an evaluation while a batch is fetched ahead",
        ),
    ],
)
def test_samples_of_each_step(work: list[list[tuple[str, int]]], counts: list[int]) -> None:
    assert _steps(work, {}) == counts


def test_two_loaders_of_which_one_feeds_no_module_alone_count_both_in_the_long_run() -> None:
    counts = _steps([[_FETCH, ("other", 8), _FORWARD]] * 4, {})
    assert counts == [8, 16, 16, 16]


@pytest.mark.parametrize(("is_stage", "count"), [(True, 0), (False, 8)], ids=["a stage", "a module beside it"])
def test_samples_are_guessed_unless_a_pipeline_calls_the_module(is_stage: bool, count: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sizes, model, inputs = BatchSizes(), torch.nn.Linear(4, 4), torch.ones(8, 4)
        model.register_forward_pre_hook(lambda module, args: sizes.forwarded(module, args, {}))
        if is_stage:
            stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=dist.new_group([0]))
            ScheduleGPipe(stage, 1, loss_fn=torch.nn.functional.mse_loss).step(inputs, target=inputs)
        else:
            model(inputs)
        sizes.backward_ended()
        assert sizes.take() == count
    finally:
        dist.destroy_process_group()


def test_samples_are_not_guessed_below_the_pipeline_engine_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    counts = {}
    try:
        for package in ("deepspeed.runtime.pipe", "colossalai.pipeline", "trainer.loops"):
            engine = ModuleType(f"{package}.engine")
            exec("def train(call):\n    call()", engine.__dict__)
            monkeypatch.setitem(sys.modules, package, engine)
            sizes = BatchSizes()
            engine.train(partial(sizes.forwarded, torch.nn.Linear(2, 2), (torch.zeros(8, 2),), {}))
            sizes.backward_ended()
            counts[package] = sizes.take()
    finally:
        dist.destroy_process_group()
    assert counts == {"deepspeed.runtime.pipe": 0, "colossalai.pipeline": 0, "trainer.loops": 8}
