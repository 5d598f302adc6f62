from __future__ import annotations

import gc
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader

from hpcpace.observe.phases import PhaseObserver
from hpcpace.observe.steps import StepFinder, StepFrom
from hpcpace.trace.schema import Phase


@pytest.fixture
def observer(rows: Any) -> Iterator[PhaseObserver]:
    observer = PhaseObserver(rows, has_open_collectives=lambda: False)
    observer.install()
    yield observer
    observer.uninstall()


def _phases(rows: Any) -> list[Phase]:
    return [Phase(row["phase"]) for row in rows.phases if row["phase"] != Phase.GC]


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()


def test_finds_the_phases_of_an_ordinary_loop(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    observer.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(torch.ones(4, 3), batch_size=2):
        _step(model, optimizer, batch)
    in_order = [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    # The loader is asked a third time and says that it is at its end.
    assert _phases(rows) == [*in_order, *in_order, Phase.DATA]
    assert all(row["begin_ns"] <= row["end_ns"] for row in rows.phases)


def test_a_loop_in_a_thread_has_its_phases_from_its_first_backward_on(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            _step(model, optimizer, torch.ones(2, 3))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()
    once = [Phase.BACKWARD, Phase.OPTIMIZER]
    assert _phases(rows) == [*once, Phase.FORWARD, *once]


def test_a_module_in_a_thread_beside_the_loop_is_not_its_forward(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.nn.Linear(3, 1), torch.ones(2, 3)).result()
    assert _phases(rows) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_gradients_on_their_way_after_the_local_backward_are_grad_sync(rows: Any) -> None:
    observer = PhaseObserver(rows, has_open_collectives=lambda: True)
    observer.install()
    torch.ones(2, requires_grad=True).sum().backward()
    observer.uninstall()
    backward, grad_sync = rows.phases
    assert (backward["phase"], grad_sync["phase"]) == (Phase.BACKWARD, Phase.GRAD_SYNC)
    assert backward["begin_ns"] < grad_sync["begin_ns"] <= grad_sync["end_ns"] == backward["end_ns"]


def test_a_model_that_fails_has_its_forward_recorded_and_its_error_raised(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    observer.watch(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    assert _phases(rows) == [Phase.FORWARD]


def test_a_backward_that_fails_is_recorded_and_raises_its_error(observer: PhaseObserver, rows: Any) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(2).sum().backward()
    assert _phases(rows) == [Phase.BACKWARD]


def test_records_collections_that_can_be_felt(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.observe.phases._SHORTEST_GC_NS", 0)
    observer = PhaseObserver(rows, has_open_collectives=lambda: False)
    observer.install()
    gc.collect()
    observer.uninstall()
    assert Counter(row["phase"] for row in rows.phases)[Phase.GC] >= 1


class Stage:
    """The two methods of a pipeline stage that a schedule calls."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)

    def forward_one_chunk(self, chunk: int, scale: float) -> torch.Tensor:
        return self.weight.sum() * scale

    def backward_one_chunk(self, chunk: int, loss: torch.Tensor) -> None:
        loss.backward()


def test_numbers_the_microbatches_of_a_pipeline_stage(observer: PhaseObserver, rows: Any) -> None:
    stage = Stage()
    observer.watch(stage)
    losses = [stage.forward_one_chunk(chunk, scale=2.0) for chunk in range(2)]
    for chunk, loss in enumerate(losses):
        stage.backward_one_chunk(chunk, loss)
    assert [(Phase(row["phase"]), row["microbatch"]) for row in rows.phases if row["phase"] != Phase.GC] == [
        (Phase.FORWARD, 0),
        (Phase.FORWARD, 1),
        (Phase.BACKWARD, 0),
        (Phase.BACKWARD, 1),
    ]


@pytest.mark.parametrize(
    "place",
    [
        lambda: vars(torch.autograd)["_engine_run_backward"],
        lambda: torch.nn.Module.__call__,
        lambda: torch.amp.GradScaler.step,
        lambda: torch.save,
        lambda: torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        lambda: list(gc.callbacks),
        lambda: dict(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        lambda: dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
    ],
)
def test_after_uninstalling_torch_is_as_before(rows: Any, place: Callable[[], Any]) -> None:
    before = place()
    observer = PhaseObserver(rows, has_open_collectives=lambda: False)
    observer.install()
    assert place() != before
    observer.uninstall()
    assert place() == before


def test_after_uninstalling_models_and_stages_are_as_before(rows: Any) -> None:
    observer = PhaseObserver(rows, has_open_collectives=lambda: False)
    model, stage = torch.nn.Linear(3, 1), Stage()
    observer.watch(model)
    observer.watch(stage)
    observer.uninstall()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert set(vars(stage)) == {"weight"}


class OptimizerInside(torch.optim.SGD):
    """Steps another optimizer in its own step, as ZeroRedundancyOptimizer does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_inside_an_optimizer_is_one_step(rows: Any) -> None:
    steps = StepFinder(StepFrom("optimizer"))
    observer = PhaseObserver(rows, has_open_collectives=lambda: False, steps=steps)
    observer.install()
    model = torch.nn.Linear(3, 1)
    _step(model, OptimizerInside(model), torch.ones(2, 3))
    observer.uninstall()
    assert steps.source.num_steps == 1
    inner, outer = (row for row in rows.phases if row["phase"] == Phase.OPTIMIZER)
    assert outer["begin_ns"] <= inner["begin_ns"] <= inner["end_ns"] <= outer["end_ns"]


def test_each_step_of_an_optimizer_ends_a_step_as_asked_for(rows: Any) -> None:
    steps = StepFinder(StepFrom("optimizer"))
    observer = PhaseObserver(rows, has_open_collectives=lambda: False, steps=steps)
    observer.install()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        _step(model, optimizer, torch.ones(2, 3))
    observer.uninstall()
    assert steps.source.num_steps == 3


class NestedFailure(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(batch)
        return result


def test_the_traceback_of_a_model_that_fails_has_no_frame_of_ours(observer: PhaseObserver) -> None:
    with pytest.raises(RuntimeError) as failure:
        NestedFailure()(torch.ones(2, 5))
    files = [str(entry.path) for entry in failure.traceback]
    assert len(files) > 4 and not any("hpcpace/observe" in file for file in files)
    with pytest.raises(RuntimeError) as failure:
        torch.ones(2).sum().backward()
    assert not any("hpcpace/observe" in str(entry.path) for entry in failure.traceback)


def test_evaluation_is_one_interval_and_what_trains_is_not_evaluated(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            torch.nn.MSELoss()(model(torch.ones(2, 3)), torch.ones(2, 1))
    model.train()
    with torch.inference_mode():
        model(torch.ones(2, 3))
    _step(model, optimizer, torch.ones(2, 3))
    assert _phases(rows) == [Phase.EVAL, Phase.OTHER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


class Remote(torch.nn.Module):
    """Has its parameters in another process, and so names none here, as torch's RemoteModule."""

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        raise ValueError("not supported")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return 2 * batch


def test_a_module_that_cannot_name_its_parameters_works_without_gradients(observer: PhaseObserver) -> None:
    with torch.no_grad():
        assert Remote()(torch.ones(2)).tolist() == [2, 2]


def test_an_evaluation_is_under_way_from_its_first_call_to_the_next_training(observer: PhaseObserver) -> None:
    model = torch.nn.Linear(3, 1).eval()
    assert observer.under_way is None
    num_ended = observer.num_ended
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert observer.under_way is not None
    assert observer.under_way[0] == Phase.EVAL
    assert observer.num_ended == num_ended + 1
    model(torch.ones(2, 3))
    assert observer.under_way is None


def test_a_checkpoint_and_a_wait_for_data_are_under_way_while_they_last(observer: PhaseObserver) -> None:
    seen: list[Any] = []

    class Watching(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            seen.append(observer.under_way)
            return index

    class File(io.BytesIO):
        def write(self, content: Any) -> int:
            seen.append(observer.under_way)
            return super().write(content)

    list(DataLoader(Watching()))
    torch.save({"a": 1}, File())
    assert {phase for phase, _ in seen} == {Phase.DATA, Phase.CHECKPOINT}
    assert observer.under_way is None


def test_modules_that_run_again_inside_backward_belong_to_it(observer: PhaseObserver, rows: Any) -> None:
    model = torch.nn.Linear(3, 1)
    torch.utils.checkpoint.checkpoint(model, torch.ones(2, 3), use_reentrant=False).sum().backward()
    assert _phases(rows) == [Phase.FORWARD, Phase.BACKWARD]


@pytest.mark.skipif(
    torch.__version__.startswith("2.11.") and sys.version_info >= (3, 12),
    reason="the profiler of torch 2.11 sees no modules under Python 3.12",
)
def test_a_profiler_with_stacks_sees_the_modules_of_the_job(observer: PhaseObserver) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True) as profiler:
        model(torch.ones(2, 3))
    names = {event.name for event in profiler.events()}
    assert {"nn.Module: Sequential_0", "nn.Module: Linear_0"} <= names
