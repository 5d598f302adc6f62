"""Loops that are bad input: steps that never end, optimizers in no order, functions of torch that others replace."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.core.text import NS_PER_S
from hpcpace.observe.guest import Warner
from hpcpace.observe.launch.follower import Follower
from hpcpace.observe.settings import TraceConfig
from hpcpace.observe.steps import StepFinder, StepFrom
from hpcpace.observe.training_calls import _MAX_FETCHED, BatchSizes
from hpcpace.observe.update_patterns import Pattern, StepSource

torch = pytest.importorskip("torch")
MANY = 10_000


class Sink:
    """Counts what is in memory, and what steps ended."""

    def __init__(self) -> None:
        self.num_marked = self.most = self.num_steps = self.num_held = 0

    def mark(self) -> None:
        self.num_marked += 1
        self.most = max(self.most, self.num_marked)

    def settle(self, steps: Sequence[int], ends_ns: Sequence[int]) -> None:
        self.num_marked = 0
        self.num_steps += len(ends_ns)

    def end_step(self, end_ns: int) -> None:
        self.num_steps += 1

    def tell_source(self, source: StepSource) -> None:
        pass


def run(updates: Iterator[str], *, rows: int = 0) -> tuple[StepFinder, Sink]:
    """Play a loop: `b` is a backward pass, other letters are optimizers; `rows` is how many rows each leaves."""
    finder, sink = StepFinder(StepFrom()), Sink()
    finder.sink = sink
    for now_ns, letter in enumerate(updates):
        sink.num_held = sink.num_held + rows if sink.num_marked else 0
        if letter == "b":
            finder.rows_wait()
            finder.backward_ended(now_ns)
        else:
            finder.optimizer_ended(letter, letter.upper(), now_ns)
    finder.finish()
    return finder, sink


def test_two_models_that_train_in_no_order_have_steps_and_say_so() -> None:
    """Before, each pair of equal updates was taken for a new pattern: a part of either model's steps was counted."""
    coin = random.Random(1)
    chosen = [coin.choice("xy") for _ in range(400)]
    finder, sink = run(iter("".join(f"b{letter}" for letter in chosen)))
    ends = finder.source.words.partition("each step of ")[2][0].lower()
    assert finder.source.words == f"optimizers step in no regular order; each step of {ends.upper()} ends a step"
    assert 0 <= sink.num_steps - chosen.count(ends) <= 2, "and those before the second one stepped"


def test_an_order_that_repeats_by_chance_is_given_up() -> None:
    """Before, nothing but a new optimizer ended it: 70 steps, and 201 of 408 updates out of order."""
    coin = random.Random(1)
    chosen = [*"xxyyxxyy", *(coin.choice("xy") for _ in range(400))]
    finder, sink = run(iter("".join(f"b{letter}" for letter in chosen)))
    assert "optimizers step in no regular order" in finder.source.words
    assert sink.num_steps == 195 and finder.source.num_irregular == 4


def test_an_order_that_slips_now_and_then_stays() -> None:
    """The last iteration of an epoch trains the critic less often, and runs into the next one."""
    finder, sink = run(iter(("bxbxbxbxbxby" * 8 + "bxbxby") * 10))
    assert (sink.num_steps, finder.source.num_irregular) == (84, 10)
    assert finder.source.words.startswith("Y then X 5 times, in turn")


def test_a_model_that_comes_in_later_belongs_to_each_step() -> None:
    finder, sink = run(iter("bx" * 30 + "bxby" * 30))
    assert finder.source.words == "Y then X, in turn, each after its own backward pass"
    assert sink.num_steps == 60


@pytest.mark.parametrize(
    ("loop", "most"),
    [
        pytest.param(
            lambda coin: "b" + "".join(coin.choice("xyz") for _ in range(MANY)), 8_192, id="one backward pass"
        ),
        pytest.param(lambda coin: "".join(coin.choice("xyz") for _ in range(MANY)), 256, id="a parameter server"),
    ],
)
def test_updates_without_backward_passes_are_bounded(loop: Callable[[random.Random], str], most: int) -> None:
    finder, sink = run(iter(loop(random.Random(2))))
    assert sink.most <= most
    assert "in no regular order" in finder.source.words and sink.num_steps > MANY // 4


def test_a_server_that_later_trains_is_understood_anew() -> None:
    coin = random.Random(3)
    finder, sink = run(iter("".join(coin.choice("xyz") for _ in range(300)) + "bx" * 100))
    assert (
        finder.source.evidence == "X, after 0 backward passes" or "after each backward pass" in finder.source.evidence
    )
    assert sink.num_steps >= 100


def test_rows_of_a_step_that_does_not_end_do_not_wait_for_ever() -> None:
    """One update, and then 10,000 microbatches: as long as five minutes of a job."""
    finder, sink = run(iter("bx" + "b" * MANY), rows=10)
    assert sink.num_marked == 0 and sink.num_steps == 1
    assert finder.source.words.endswith(f"no step was seen to end in the last {MANY} backward passes")


def test_steps_that_stop_being_seen_are_reported() -> None:
    """As where a script puts an optimizer's own step in the place of the one that torch's hooks see."""
    finder, sink = run(iter("bx" * 20 + "b" * 40))
    assert sink.num_steps == 20
    assert str(finder.source) == (
        "20 steps by optimizer: X, after each backward pass; no step was seen to end in the last 40 backward passes"
    )
    finder, _ = run(iter("bbbx" * 20 + "bbb"))
    assert "no step was seen" not in finder.source.words, "a step that is cut off"


def test_a_loop_that_never_updates_has_no_step_and_says_so(tmp_path: Path) -> None:
    """Gradients add up over 600 backward passes: before, that was a step that ends with each backward pass."""
    config = Config(TraceConfig(counters=False, snapshot=False))
    with hpcpace.session(run_dir=tmp_path, config=config, world=rank_info({}), step_from="auto") as session:
        model = torch.nn.Linear(3, 1)
        for _ in range(600):
            model(torch.rand(4, 3)).square().mean().backward()
    assert session.recorded is not None
    assert (session.recorded["steps"], session.recorded["steps_from"]) == (
        0,
        "gradients add up, and nothing was seen to update parameters; "
        "no step was seen to end in the last 600 backward passes",
    )


def test_a_last_step_that_is_cut_off_is_none(tmp_path: Path) -> None:
    config = Config(TraceConfig(counters=False, snapshot=False))
    with hpcpace.session(run_dir=tmp_path, config=config, world=rank_info({}), step_from="auto") as session:
        model = torch.nn.Linear(3, 1)
        for number in range(3 * 20 + 2):
            model(torch.rand(4, 3)).square().mean().backward()
            if number % 3 == 2:
                with torch.no_grad():
                    model.weight -= 0.1 * model.weight.grad
                model.zero_grad()
    assert session.recorded is not None and session.recorded["steps"] == 20


def test_one_warning_while_a_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    finder = StepFinder(StepFrom(), warn=Warner({}).warn_once_for_all)
    finder.has_changed = lambda: False
    monkeypatch.setattr("builtins.print", lambda text, **_: warned.append(text))
    for second in range(MANY):
        finder.work_begins(second * NS_PER_S)
        finder.backward_ended(second * NS_PER_S)
    assert warned == [
        "hpcpace: warning: no step was seen to end in the last 572 backward passes: gradients add up, and nothing was "
        "seen to update parameters; `hpcpace trace --step-from backward:N` ends one after every N of them"
    ]


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        (["x"] * 5 + ["y"], "X 5 times then Y, in turn, each after its own backward pass"),
        (["x", "x", "y", "y", "x"], "X 2 times then Y 2 times then X, in turn, each after its own backward pass"),
        ([*"abcdefghi"], "A then B then C then D then 5 others, in turn, each after its own backward pass"),
        (["abcdefghi"], "A and B and C and D and 5 others, after each backward pass"),
    ],
)
def test_the_words_for_a_pattern_are_bounded(updates: list[str], words: str) -> None:
    names = tuple(tuple(update.upper()) for update in updates)
    assert Pattern(updates=tuple(map(tuple, updates)), names=names).evidence == words


def test_batches_that_no_module_gets_are_bounded() -> None:
    sizes, loader = BatchSizes(), SimpleNamespace
    for _ in range(MANY):
        sizes.fetched(torch.zeros(4, 1), loader)
    assert len(sizes._fetched) <= _MAX_FETCHED
    assert sizes.take() == 4 * (MANY - 1), "all but the one that was fetched ahead"


class Descent(torch.optim.Optimizer):
    """Counts its updates; a class of its own, as tests must not change torch's."""

    def __init__(self, parameters: Iterator[Any]) -> None:
        super().__init__(parameters, {})
        self.num_updates = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.num_updates += 1
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def put(owner: Any, calls: list[str], step: Callable[..., Any], *, as_method: bool = False) -> Callable[..., Any]:
    """Put a function that counts its calls, and then calls `step`, in the place of an owner's `step`."""

    def counted(*args: Any) -> Any:
        calls.append("script")
        return step(*args)

    owner.step = MethodType(counted, owner) if as_method else counted
    return vars(owner)["step"]


@pytest.mark.parametrize(
    "replace",
    [
        pytest.param(lambda kind, optimizer, calls, raw: put(kind, calls, raw), id="class, from before torch's hooks"),
        pytest.param(lambda kind, optimizer, calls, raw: put(kind, calls, kind.step), id="class, on top of the hooks"),
        pytest.param(
            lambda kind, optimizer, calls, raw: put(kind, calls, wraps(kind.step)(lambda own: raw(own))),
            id="class, with the name of what it leaves out",
        ),
        pytest.param(
            lambda kind, optimizer, calls, raw: put(optimizer, calls, optimizer.step), id="optimizer, on top of its own"
        ),
        pytest.param(
            lambda kind, optimizer, calls, raw: put(optimizer, calls, partial(raw, optimizer)),
            id="optimizer, from before torch's hooks",
        ),
        pytest.param(
            lambda kind, optimizer, calls, raw: put(optimizer, calls, raw, as_method=True),
            id="optimizer, a method of it",
        ),
    ],
)
@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_step_that_a_script_replaces_in_the_middle_is_seen(tmp_path: Path, replace: Any, is_put_back: bool) -> None:
    raw = vars(Descent)["step"]
    kind: Any = type("Replaced", (Descent,), {"step": raw})
    config, calls = Config(TraceConfig(counters=False, snapshot=False)), []
    model = torch.nn.Linear(3, 1)
    with hpcpace.session(run_dir=tmp_path, config=config, world=rank_info({}), step_from="auto") as session:
        optimizer, left = kind(model.parameters()), None
        for step in range(30):
            if step == 11:
                left = replace(kind, optimizer, calls, raw)
            if step == 20 and is_put_back:
                vars(optimizer).pop("step", None)
                kind.step = left = raw
            model(torch.rand(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.recorded is not None and session.recorded["steps"] == 30
    assert optimizer.num_updates == 30 and len(calls) == (9 if is_put_back else 19)
    assert left in (vars(kind)["step"], vars(optimizer).get("step"))


def test_schedulers_keep_their_step_and_their_warning_and_optimizers_are_freed(tmp_path: Path) -> None:
    """Torch's schedulers put a function with a mark into the optimizer, and warn where another one has replaced it."""
    config = Config(TraceConfig(counters=False, snapshot=False))
    model, seen = torch.nn.Linear(3, 1), []
    with hpcpace.session(run_dir=tmp_path, config=config, world=rank_info({}), step_from="auto") as session:
        optimizer: Any = Descent(model.parameters())
        optimizer.param_groups[0]["lr"] = 1.0
        for step in range(30):
            if step == 8:
                first, second = (torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2))
            if step == 20:
                put(optimizer, [], partial(vars(Descent)["step"], weakref.proxy(optimizer)))
            model(torch.rand(4, 3)).square().mean().backward()
            seen.append(vars(optimizer).get("step"))
            optimizer.step()
            optimizer.zero_grad()
            if step == 9:
                first.step()
        with pytest.warns(UserWarning, match="has been overridden"):
            second.step()
        assert optimizer.num_updates == 30 and optimizer.param_groups[0]["lr"] == 0.25
        del first, second
        gone = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert gone() is None
        finally:
            gc.enable()
    assert session.recorded is not None and session.recorded["steps"] == 30
    assert "lr_scheduler" in seen[8].__code__.co_filename and seen[8] is seen[19] is not seen[20]


def test_a_function_that_a_script_wraps_before_it_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It called the script's function on top, and that called it again, without end."""
    owner: Any = ModuleType("owner")
    owner.backward = lambda: calls.append("torch")
    calls: list[str] = []
    follower = Follower(SimpleNamespace(pid=0))
    monkeypatch.setattr(follower, "_train_alone", lambda: (calls.append("starts"), follower._wait_no_more()))
    follower._wait_for_call(owner, "backward", lambda: False)
    below = owner.backward

    def on_top() -> None:
        calls.append("script")
        below()

    owner.backward = on_top
    owner.backward()
    owner.backward()
    assert calls == ["script", "starts", "torch", "script", "torch"]
