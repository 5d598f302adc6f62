"""Steps and phases found in loops of one process: what is unknown ends no step, and what a loader calls is data."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpcpace
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase, StepFlag
from hpcpace.world.clock import ClockSync

STEPS = 40
WIDTH = 4


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is usually written: it moves the parameters, and lets another one step."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.01)

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["before"]
        self.base.step()
        self.zero_grad()


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH)


def with_sam() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = Sam(model.parameters())
    for _ in range(STEPS):
        x = batch()
        model(x).square().mean().backward()
        optimizer.climb()
        model(x).square().mean().backward()
        optimizer.descend()


def accumulating(optimizer_kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
    """Microbatches whose loss is a module without parameters, which is called last."""
    model, criterion = nn.Linear(WIDTH, WIDTH), nn.CrossEntropyLoss()
    optimizer = optimizer_kind(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        for _ in range(4):
            criterion(model(batch()), torch.randint(WIDTH, (3,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def through_identity() -> None:
    """A stage without parameters, first and last."""
    inner, outer = nn.Linear(WIDTH, WIDTH), nn.Identity()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        for _ in range(3):
            outer(inner(outer(batch()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def by_hand() -> None:
    """No optimizer of torch: parameters change through `.data`, after two microbatches."""
    model, criterion = nn.Linear(WIDTH, WIDTH), nn.MSELoss()
    for _ in range(STEPS):
        for _ in range(2):
            criterion(model(batch()), batch()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None


def without_modules() -> None:
    """Nothing shows what a backward pass is for: each is a step."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    for _ in range(STEPS):
        (batch() @ weight).square().mean().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None


def only_losses_are_modules() -> None:
    weight, criterion = torch.randn(WIDTH, WIDTH, requires_grad=True), nn.MSELoss()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(STEPS):
        for _ in range(5):
            criterion(batch() @ weight, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def lbfgs() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def traced(path: Path, loop: Callable[[], Any]) -> tuple[int, Counter[Phase], Any]:
    """Return the number of steps that were found, rows by phase, and the trace."""
    with hpcpace.session(run_dir=path, step_from="auto") as session:
        loop()
    assert session.run is not None
    (trace,) = read_attempt(session.run.attempt(0)).traces
    return len(trace.tables["steps"]), Counter(Phase(phase) for phase in trace.tables["phases"]["phase"]), trace


@pytest.mark.filterwarnings("ignore")
def test_what_is_unknown_ends_no_step(tmp_path: Path) -> None:
    loops = (with_sam, accumulating, through_identity, by_hand, without_modules, only_losses_are_modules, lbfgs)
    found = {loop.__name__: traced(tmp_path / loop.__name__, loop)[0] for loop in loops}
    assert found == {loop.__name__: STEPS for loop in loops}


class Noisy(Dataset[torch.Tensor]):
    """Transforms that are modules, one of which trains nothing and one without gradients."""

    def __init__(self) -> None:
        self.blur, self.teacher = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def __len__(self) -> int:
        return 3 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            seen = self.teacher(torch.ones(WIDTH))
        return self.blur(seen).detach()


def test_what_a_loader_calls_is_data(tmp_path: Path) -> None:
    def loop() -> None:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in DataLoader(Noisy(), batch_size=3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    num_steps, phases, _ = traced(tmp_path / "run", loop)
    assert num_steps == STEPS
    assert phases[Phase.FORWARD] == phases[Phase.BACKWARD] == STEPS
    assert phases[Phase.DATA] == STEPS + 1, "and the end of the loader"
    assert Phase.EVAL not in phases


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_rollout_in_each_step_is_no_evaluation(tmp_path: Path, mode: str) -> None:
    """As PPO does it: the policy plays without gradients, and is then trained on what it has seen."""

    def loop() -> None:
        policy = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.Adam(policy.parameters())
        for step in range(STEPS):
            policy.train(mode == "train")
            with torch.no_grad():
                seen = [policy(batch()) for _ in range(5)]
                if step == STEPS - 1:
                    time.sleep(0.01)
            policy.train()
            policy(torch.cat(seen)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    num_steps, phases, trace = traced(tmp_path / "run", loop)
    assert num_steps == STEPS
    assert (phases[Phase.EVAL], phases[Phase.OTHER]) == (0, 5 * STEPS if mode == "train" else STEPS)
    assert "other those without that show no evaluation" in b" ".join(trace.tables["events"]["text"].tolist()).decode()


@pytest.mark.parametrize("has_prompts", [False, True])
def test_a_rollout_before_several_updates_is_no_evaluation(tmp_path: Path, has_prompts: bool) -> None:
    """As PPO does it, and as a language model does it that answers the prompts of a loader."""

    def loop() -> None:
        policy = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.Adam(policy.parameters())
        prompts = iter(DataLoader(torch.ones(STEPS, WIDTH), batch_size=1))
        for _ in range(STEPS // 4):
            seen = next(prompts) if has_prompts else batch()
            policy.eval()
            with torch.no_grad():
                for _ in range(3):
                    seen = policy(seen)
            policy.train()
            for part in DataLoader(torch.cat([seen] * 4), batch_size=len(seen)):
                policy(part).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    num_steps, phases, trace = traced(tmp_path / "run", loop)
    assert num_steps == STEPS
    assert (phases[Phase.EVAL], phases[Phase.OTHER]) == (0, STEPS // 4)
    assert not (trace.tables["steps"]["flags"] & StepFlag.EVAL).any()


class WithLoss(nn.Linear):
    """Returns a loss, too, as models of language do."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x), "loss": super().forward(x).square().mean()}


def read_whole(model: nn.Module, loader: Any) -> None:
    for x in loader:
        model(x)


def read_once(model: nn.Module, loader: Any) -> None:
    model(next(iter(loader)))


def with_loss(model: nn.Module, _: Any) -> None:
    WithLoss(WIDTH, WIDTH).eval()(batch())


def with_criterion(model: nn.Module, _: Any) -> None:
    for _ in range(2):
        nn.MSELoss()(nn.Softmax(-1)(model(batch())), batch())


@pytest.mark.parametrize(
    ("evaluate", "workers"), [(read_whole, 0), (read_whole, 1), (read_once, 0), (with_loss, 0), (with_criterion, 0)]
)
def test_a_loss_or_the_end_of_a_loader_shows_an_evaluation(tmp_path: Path, evaluate: Any, workers: int) -> None:
    def loop() -> None:
        model, lasting = nn.Linear(WIDTH, WIDTH), {"num_workers": workers, "persistent_workers": bool(workers)}
        loader: Any = DataLoader(torch.ones(4, WIDTH), batch_size=2, **lasting)
        optimizer = torch.optim.Adam(model.parameters())
        for number, x in enumerate(DataLoader(torch.ones(STEPS, WIDTH), batch_size=1)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                model.eval()
                with torch.no_grad():
                    evaluate(model, loader)
                model.train()

    num_steps, phases, trace = traced(tmp_path / "run", loop)
    assert num_steps == STEPS
    assert (phases[Phase.EVAL], phases[Phase.OTHER]) == (STEPS // 4, 0)
    assert (trace.tables["steps"]["flags"] & StepFlag.EVAL > 0).sum() == STEPS // 4 - 1, "the last is behind all steps"


def in_threads() -> None:
    """Train two models in two threads, update by update in turn."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(number: int) -> None:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            turns[number].acquire()
            model(batch()).square().mean().backward()
            optimizer.step()
            turns[1 - number].release()

    threads = [threading.Thread(target=train, args=[number]) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_two_threads_that_train_one_is_followed(tmp_path: Path) -> None:
    num_steps, phases, _ = traced(tmp_path / "run", in_threads)
    assert num_steps == phases[Phase.BACKWARD] == phases[Phase.OPTIMIZER] == STEPS


def test_training_that_goes_on_in_another_thread_is_followed(tmp_path: Path) -> None:
    """One thread for each epoch, or the main one first and then another for good."""

    def loop() -> None:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train() -> None:
            for _ in range(STEPS // 4):
                model(batch()).square().mean().backward()
                optimizer.step()

        for _ in range(4):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    assert traced(tmp_path / "run", loop)[0] == STEPS


def test_what_a_thread_reads_ahead_takes_no_time_from_a_step(tmp_path: Path) -> None:
    def loop() -> None:
        model, read = nn.Linear(WIDTH, WIDTH), Queue[Any](2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def read_ahead() -> None:
            for x in DataLoader(torch.ones(2 * STEPS, WIDTH), batch_size=2):
                read.put(x)

        thread = threading.Thread(target=read_ahead)
        thread.start()
        for _ in range(STEPS):
            model(read.get()).square().mean().backward()
            optimizer.step()
        thread.join()

    num_steps, phases, trace = traced(tmp_path / "run", loop)
    assert num_steps == STEPS and Phase.DATA not in phases
    assert set(trace.tables["steps"]["samples"].tolist()) == {2}


def test_no_step_compares_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, sync = list[str](), ClockSync.sync

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return sync(*args, **options)

    monkeypatch.setattr(ClockSync, "sync", noted)
    monkeypatch.setenv("HPCPACE_CLOCK_INTERVAL_S", "0.1")

    def loop() -> None:
        accumulating()
        time.sleep(0.4)

    _, _, trace = traced(tmp_path / "run", loop)
    own = threading.current_thread().name
    assert threads.count(own) == 1, "before the first step"
    assert len(threads) == len(trace.tables["clock"]) >= 3
