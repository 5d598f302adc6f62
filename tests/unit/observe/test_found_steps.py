"""Scripts that never say where a step ends: as many steps as iterations, and each with the rows of its iteration."""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import each_case
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.rpc import TensorPipeRpcBackendOptions
from torch.utils.data import DataLoader

import hpcpace
from hpcpace import Session
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.observe.phases import PhaseObserver
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind, Phase

NUM_ITERATIONS = 60
_BATCH = 4


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


def _batches() -> Iterator[torch.Tensor]:
    return iter(DataLoader(torch.rand(NUM_ITERATIONS * _BATCH, 3), batch_size=_BATCH))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum().sin()).square().mean()


def one_optimizer() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in _batches():
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def gan() -> None:
    generator, discriminator = nn.Linear(3, 3), _model()
    first, second = (torch.optim.Adam(model.parameters()) for model in (discriminator, generator))
    for batch in _batches():
        first.zero_grad()
        (_loss(discriminator, batch) - _loss(discriminator, generator(batch).detach())).backward()
        first.step()
        second.zero_grad()
        _loss(discriminator, generator(batch)).backward()
        second.step()


def gan_whose_generator_steps_less_often() -> None:
    generator, discriminator = nn.Linear(3, 3), _model()
    first, second = (torch.optim.RMSprop(model.parameters()) for model in (discriminator, generator))
    for _ in range(NUM_ITERATIONS):
        for _ in range(5):
            first.zero_grad()
            _loss(discriminator, generator(torch.ones(_BATCH, 3)).detach()).backward()
            first.step()
        second.zero_grad()
        _loss(discriminator, generator(torch.ones(_BATCH, 3))).backward()
        second.step()


def gradients_over_rpc() -> None:
    """Let each step pass the engine and the optimizer of torch's RPC, which no hook of torch sees."""
    with warnings.catch_warnings(action="ignore"):  # of what torch itself does there
        _train_over_rpc()


def _train_over_rpc() -> None:
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    model = _model()
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    options = TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
    optimizer = DistributedOptimizer(_Own, [rpc.RRef(parameter) for parameter in model.parameters()], lr=0.1)
    for batch in _batches():
        with autograd.context() as context:
            autograd.backward(context, [_loss(model, batch)])
            optimizer.step(context)
    rpc.shutdown()


class _Own(torch.optim.SGD):
    """Is none of those that torch compiles: it warns of that."""


def two_optimizers_of_one_backward() -> None:
    model = _model()
    optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    for batch in _batches():
        _loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def one_optimizer_that_steps_for_each_group() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches():
        _loss(model, batch).backward()
        for _ in range(2):
            optimizer.step()
        optimizer.zero_grad()


def one_optimizer_a_parameter_inside_backward() -> None:
    model = _model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for batch in _batches():
        _loss(model, batch).backward()


def accumulated_gradients() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches():
        for part in batch.chunk(4):
            _loss(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()


def manual_update() -> None:
    model = _model()
    for batch in _batches():
        _loss(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def manual_update_of_data_with_accumulated_gradients() -> None:
    model = _model()
    for batch in _batches():
        for part in batch.chunk(2):
            _loss(model, part).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(0.1 * parameter.grad.data)
            parameter.grad.data.zero_()


def manual_update_by_gradients() -> None:
    model = _model()
    parameters = list(model.parameters())
    for batch in _batches():
        gradients = torch.autograd.grad(_loss(model, batch), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient


def gradients_of_a_function() -> None:
    """Keep parameters outside of the module, as torch.func wants it."""
    model = _model()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss(own: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(model, own, (batch,)) - batch.sum().sin()).square().mean()

    for batch in _batches():
        gradients = torch.func.grad(loss)(parameters, batch)
        parameters = {name: own - 0.1 * gradients[name] for name, own in parameters.items()}


def outer_optimizer_in_every_sixth_step() -> None:
    """Average parameters now and then, as DiLoCo does, by an optimizer that no backward pass belongs to."""
    model, outer = _model(), _model()
    optimizer = torch.optim.AdamW(model.parameters())
    slow = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for iteration, batch in enumerate(_batches()):
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration % 6 == 5:
            for far, near in zip(outer.parameters(), model.parameters(), strict=True):
                far.grad = far.detach() - near.detach()
            slow.step()
            model.load_state_dict(outer.state_dict())


def no_module() -> None:
    weight = torch.ones(3, requires_grad=True)
    for batch in _batches():
        (batch @ weight).square().mean().backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
            weight.grad.zero_()


@dataclass
class PlainOptimizer:
    """An optimizer that is none of torch's."""

    parameters: list[torch.Tensor]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None


def optimizer_that_is_none_of_torch() -> None:
    model = _model()
    optimizer = PlainOptimizer(list(model.parameters()))
    for batch in _batches():
        _loss(model, batch).backward()
        optimizer.step()


def lbfgs() -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch in _batches():

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def closure() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in _batches():

        def closure(batch: torch.Tensor = batch) -> float:
            optimizer.zero_grad()
            loss = _loss(model, batch)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def resumed() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    _init_optim_state(optimizer)
    for batch in _batches():
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_that_overflow() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for batch in _batches():
        scaler.scale(_loss(model, batch) * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def adversarial_inputs() -> None:
    """Ascend in the input for three passes, as PGD does, and then train on what comes of it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in _batches():
        shift = torch.zeros_like(batch, requires_grad=True)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(_loss(model, batch + shift), shift)
            shift = (shift + 0.01 * gradient.sign()).detach().requires_grad_()
        _loss(model, batch + shift.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()


def cached_gradients() -> None:
    """Embed without gradients, take those of the loss, and embed once more in parts, as contrastive losses do."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in _batches():
        parts = batch.chunk(2)
        with torch.no_grad():
            leaves = [model(part).requires_grad_() for part in parts]
        torch.cat(leaves).logsumexp(0).sum().backward()
        for part, leaf in zip(parts, leaves, strict=True):
            model(part).backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()


def meta_learning() -> None:
    """Differentiate through two inner updates of each of two tasks, as MAML does."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in _batches():
        for task in batch.chunk(2):
            inner = dict(model.named_parameters())
            for _ in range(2):
                loss = torch.func.functional_call(model, inner, (task,)).square().mean()
                gradients = torch.autograd.grad(loss, [*inner.values()], create_graph=True)
                inner = {
                    name: own - 0.1 * gradient for (name, own), gradient in zip(inner.items(), gradients, strict=True)
                }
            torch.func.functional_call(model, inner, (task,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def penalty_on_gradients() -> None:
    """Train a critic twice for each update of the generator, with a penalty on gradients of gradients."""
    generator, critic = nn.Linear(3, 3), _model()
    first, second = (torch.optim.Adam(model.parameters()) for model in (critic, generator))
    for batch in _batches():
        for _ in range(2):
            between = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            first.zero_grad()
            (_loss(critic, generator(batch).detach()) + (gradient.norm(dim=1) - 1).square().mean()).backward()
            first.step()
        second.zero_grad()
        _loss(critic, generator(batch)).backward()
        second.step()


def frozen_and_thawed() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for number, batch in enumerate(_batches()):
        if number == 20:
            model[0].requires_grad_(False)
            optimizer = torch.optim.Adam([own for own in model.parameters() if own.requires_grad])
        if number == 40:
            optimizer.add_param_group({"params": [*model[0].requires_grad_().parameters()]})
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def several_epochs_over_a_rollout() -> None:
    """Play without gradients, and then make four updates, each of which is a step."""
    policy = _model()
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(NUM_ITERATIONS // 4):
        with torch.no_grad():
            seen = [policy(torch.rand(_BATCH, 3)) for _ in range(5)]
        for _ in range(2):
            for half in torch.cat(seen).expand(-1, 3).chunk(2):
                _loss(policy, half).backward()
                optimizer.step()
                optimizer.zero_grad()


def gradients_of_two_losses() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in _batches():
        seen = model(batch)
        seen.square().mean().backward(retain_graph=True)
        seen.sin().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged_models() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    rate = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for batch in _batches():
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        rate.step()
    torch.optim.swa_utils.update_bn(_batches(), average)


class LookAhead(torch.optim.Optimizer):
    """Lets another optimizer step, and moves parameters halfway back after every fifth step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.num_steps = base, 0
        super().__init__(base.param_groups[0]["params"], {})
        self.slow = [own.detach().clone() for own in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for own, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                own.data.copy_(slow.lerp_(own.detach(), 0.5))


def optimizer_around_another() -> None:
    model = _model()
    optimizer = LookAhead(torch.optim.Adam(model.parameters()))
    for batch in _batches():
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated_and_saved(folder: Path) -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for number, batch in enumerate(_batches()):
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 19:
            model.eval()
            with torch.no_grad():
                for held_out in DataLoader(torch.ones(8, 3), batch_size=2):
                    model(held_out)
            model.train()
            torch.save(model.state_dict(), folder / "model.pt")


def _traced(program: Callable[[], None], folder: Path, step_from: str = "auto") -> tuple[Session, Any]:
    torch.manual_seed(0)
    config = Config(TraceConfig(counters=False, snapshot=False))
    session = hpcpace.session(run_dir=folder / "run", config=config, world=rank_info({}), step_from=step_from)
    with session:
        program()
    assert session.attempt is not None
    return session, read_trace(session.attempt.trace_file(0))


PROGRAMS: dict[Callable[[], None], str] = {
    one_optimizer: "Adam, after each backward pass",
    gan: "Adam then Adam, in turn, each after its own backward pass",
    gan_whose_generator_steps_less_often: "in turn",
    two_optimizers_of_one_backward: "Adam and SGD, after each backward pass",
    one_optimizer_that_steps_for_each_group: "2 x SGD, after each backward pass",
    one_optimizer_a_parameter_inside_backward: "4 of SGD inside backward",
    accumulated_gradients: "SGD, after 4 backward passes",
    manual_update: "no torch optimizer steps",
    manual_update_of_data_with_accumulated_gradients: "no torch optimizer steps",
    gradients_of_a_function: "each backward pass ends a step",
    outer_optimizer_in_every_sixth_step: "AdamW, after each backward pass",
    manual_update_by_gradients: "no torch optimizer steps",
    no_module: "each backward pass ends a step",
    optimizer_that_is_none_of_torch: "no torch optimizer steps",
    gradients_over_rpc: "DistributedOptimizer, after each backward pass",
    lbfgs: "LBFGS",
    closure: "Adam, after each backward pass",
    resumed: "Adam, after each backward pass",
    gradients_that_overflow: "SGD, after each backward pass",
    adversarial_inputs: "SGD, after 4 backward passes",
    cached_gradients: "AdamW, after 3 backward passes",
    meta_learning: "Adam, after 6 backward passes",
    penalty_on_gradients: "Adam 2 times then Adam, in turn",
    frozen_and_thawed: "Adam, after each backward pass",
    several_epochs_over_a_rollout: "Adam, after each backward pass",
    gradients_of_two_losses: "Adam, after 2 backward passes",
    averaged_models: "SGD, after each backward pass",
    optimizer_around_another: "LookAhead, after each backward pass",
}


@each_case("program", PROGRAMS, ids=lambda program: program.__name__)
def test_has_as_many_steps_as_iterations(program: Callable[[], None], tmp_path: Path) -> None:
    session, trace = _traced(program, tmp_path)
    assert trace.tables["steps"]["step"].tolist() == list(range(NUM_ITERATIONS))
    assert session.recorded is not None and session.recorded["steps"] == NUM_ITERATIONS
    events = trace.tables["events"]
    last = (events["kind"] == EventKind.STEP_SOURCE).nonzero()[0][-1]
    text = events["text"][last].decode()
    assert session.recorded["steps_from"] in text
    assert text.startswith(f"{NUM_ITERATIONS} steps by ") and PROGRAMS[program] in text
    assert events["code"][last] == 0  # updates out of order


@each_case(
    "program", [one_optimizer, gan, accumulated_gradients, resumed, closure], ids=lambda program: program.__name__
)
def test_each_step_has_the_rows_of_its_iteration(program: Callable[[], None], tmp_path: Path) -> None:
    _, trace = _traced(program, tmp_path)
    phases = trace.tables["phases"]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        counts = Counter(phases["step"][phases["phase"] == phase].tolist())
        assert set(counts) == set(range(NUM_ITERATIONS))
        assert len(set(counts.values())) == 1


@each_case(
    "program",
    [one_optimizer, gan, accumulated_gradients, resumed, closure, gradients_that_overflow, no_module],
    ids=lambda program: program.__name__,
)
def test_guesses_the_samples_of_each_step(program: Callable[[], None], tmp_path: Path) -> None:
    _, trace = _traced(program, tmp_path)
    assert trace.tables["steps"]["samples"].tolist() == [_BATCH] * NUM_ITERATIONS
    events = trace.tables["events"]
    (text,) = events["text"][events["kind"] == EventKind.SAMPLES_SOURCE]
    assert text.startswith(b"a guess: ")


def test_gradients_on_their_way_in_a_backward_over_rpc_are_grad_sync(rows: Any) -> None:
    observer = PhaseObserver(rows, has_open_collectives=lambda: True)
    observer.install()
    gradients_over_rpc()
    observer.uninstall()
    spans = {
        phase: [(row["begin_ns"], row["end_ns"]) for row in rows.phases if row["phase"] == phase]
        for phase in (Phase.BACKWARD, Phase.GRAD_SYNC)
    }
    assert len(spans[Phase.GRAD_SYNC]) == NUM_ITERATIONS
    for (begin_ns, end_ns), (sync_ns, sync_end_ns) in zip(*spans.values(), strict=True):
        assert begin_ns < sync_ns <= sync_end_ns == end_ns


def test_steps_with_evaluation_and_checkpoint_are_marked(tmp_path: Path) -> None:
    _, trace = _traced(partial(evaluated_and_saved, tmp_path), tmp_path)
    phases, steps = trace.tables["phases"], trace.tables["steps"]
    assert steps["step"].tolist() == list(range(NUM_ITERATIONS))
    assert steps["step"][steps["flags"] & 4 != 0].tolist() == [20, 40]
    for phase in (Phase.EVAL, Phase.CHECKPOINT):
        assert phases["step"][phases["phase"] == phase].tolist() == [20, 40, 60]
    assert steps["samples"].tolist() == [_BATCH] * NUM_ITERATIONS


@each_case(("step_from", "num_steps"), [("optimizer", 120), ("backward:2", 60), ("optimizer:3", 40)])
def test_counts_what_it_is_asked_to(step_from: str, num_steps: int, tmp_path: Path) -> None:
    session, _ = _traced(gan, tmp_path, step_from)
    assert session.recorded is not None and session.recorded["steps"] == num_steps
