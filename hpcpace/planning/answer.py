"""The layouts of a job that are worth a look: the fastest ones that fit into memory, and what would help them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpcpace.core.errors import CannotTell, ConfigError
from hpcpace.core.text import plural
from hpcpace.metrics import Bools, Ints
from hpcpace.planning.engine import Engine, Job
from hpcpace.planning.layouts import Layouts, Recompute, enumerate_layouts
from hpcpace.planning.model import MeasuredModel
from hpcpace.planning.steps import steps_of

MEMORY_SHARE = 0.92
"""Share of a processor's memory that a layout may fill: the CUDA context, NCCL and fragmentation take the rest."""
MAX_GROWTH = 16
"""Nodes over those of the measurements up to which steps are predicted."""
OTHER_WAYS = 1.5
"""Half-width around pipelines and tensor parallelism planned from a run of replicas, over that around replicas: in the
lab such predictions were off by up to 23 % (docs/results/plan.md)."""
_BILLION = 1e9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, predicted.

    Attributes:
        layout: the numbers of its columns in `Layouts`.
        nodes: of the job.
        num_ranks: of the job.
        step_s: time of a step, and the interval around it; `low_s` and `high_s` are None where no measurement says.
        tokens: of a step, or samples of a model without sequences.
        memory_bytes: of the rank with most.
        network_bytes: that the busiest node sends to others in a step.
        shares: of step time, by the parts of `Engine.parts_s`.
    """

    layout: Mapping[str, int]
    nodes: int
    num_ranks: int
    step_s: float
    low_s: float | None
    high_s: float | None
    tokens: int
    memory_bytes: float
    network_bytes: float
    shares: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens, or such samples, per second."""
        return self.tokens / self.step_s

    @property
    def gpu_hours_per_billion(self) -> float:
        """Hours of a processor for a billion tokens."""
        return _BILLION / self.tokens_per_s * self.num_ranks / 3600

    @property
    def hours_per_billion(self) -> float:
        """Hours for a billion tokens."""
        return _BILLION / self.tokens_per_s / 3600


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a change would do to the best layout's throughput.

    Attributes:
        name: of the change.
        factor: throughput with it over throughput without.
    """

    name: str
    factor: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is worth knowing of the layouts of a job.

    Attributes:
        choices: the fastest layouts for each number of nodes, by nodes and then by step time.
        num_layouts: that were computed.
        num_too_large: of them that do not fit into memory.
        left_out: numbers of nodes that no layout fits, a sentence each.
        changes: to the best layout on the most nodes.
    """

    choices: tuple[Choice, ...]
    num_layouts: int
    num_too_large: int
    left_out: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def best(self) -> tuple[Choice, ...]:
        """The fastest layout for each number of nodes."""
        return tuple({choice.nodes: choice for choice in reversed(self.choices)}.values())[::-1]

    @property
    def front(self) -> tuple[Choice, ...]:
        """Layouts that none beats in both time and processors' hours for a billion tokens (Pareto), fastest first."""
        found: list[Choice] = []
        for choice in sorted(self.choices, key=lambda one: (one.hours_per_billion, one.gpu_hours_per_billion)):
            if not found or choice.gpu_hours_per_billion < found[-1].gpu_hours_per_billion * (1 - 1e-9):
                found.append(choice)
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is asked for.

    Attributes:
        job: model, machine and habits of the framework.
        nodes: numbers of them to look at.
        batch: sequences of a step.
        only: values of some columns of layouts.
        error: half-width of predictions, logarithmic; None where no measurement says.
        correction: measured over predicted step of the run that constants come from; 1 without one.
        max_ranks: beyond which predictions have no interval; None without a limit.
        measured: the layout of the run that constants come from; None without one.
    """

    job: Job
    nodes: Sequence[int]
    batch: int
    only: Mapping[str, Sequence[int]]
    error: float | None
    correction: float = 1.0
    max_ranks: int | None = None
    measured: Mapping[str, int] | None = None

    def layouts(self, nodes: int) -> Layouts:
        """Return the layouts on a number of nodes.

        Raises:
            ConfigError: none fits.
        """
        only = self.only
        if isinstance(self.job.model, MeasuredModel):
            # How long parts of a batch take, or activations again, was not measured.
            only = {**only, "num_micro": (1,), "recompute": (Recompute.NONE,), "zero": (0,)}
        per_node = self.job.machine.gpus_per_node
        return enumerate_layouts(self.job.model, nodes * per_node, self.batch, only, gpus_per_node=per_node)


def check_growth(question: Question, measured_nodes: int) -> None:
    """Refuse numbers of nodes that are too far from those of the run that constants come from.

    Raises:
        CannotTell: one is more than `MAX_GROWTH` times as many.
    """
    most = max(question.nodes)
    if most > MAX_GROWTH * measured_nodes:
        raise CannotTell(
            f"{most} nodes are more than {MAX_GROWTH} times the {measured_nodes} of the run: nothing measured carries "
            "that far; plan from a run on more nodes, or without one by --model and --machine"
        )


def answer(question: Question, *, top: int) -> Plan:
    """Return the best layouts of a job.

    Args:
        question: what to look at.
        top: layouts to return for each number of nodes.

    Raises:
        ConfigError: no layout fits the model and the batch.
        CannotTell: none fits into memory.
    """
    choices: list[Choice] = []
    num_layouts = num_too_large = 0
    left_out: dict[int, str] = {}
    for nodes in question.nodes:
        try:
            layouts = question.layouts(nodes)
        except ConfigError as error:
            left_out[nodes] = str(error)
            continue
        engine = steps_of(question.job, layouts)
        fits = _fits(engine)
        num_layouts, num_too_large = num_layouts + len(layouts), num_too_large + int((~fits).sum())
        if not fits.any():
            left_out[nodes] = _too_large(question, float(engine.memory_bytes.min()))
            continue
        order = np.flatnonzero(fits)[np.argsort(engine.step_s[fits], kind="stable")]
        choices += _choices(question, layouts.take(_least_recomputing(layouts, order)[:top]), nodes)
    if not choices:
        reasons = list(left_out.values())
        if num_layouts:
            raise CannotTell(reasons[-1])
        raise ConfigError(reasons[0])
    return Plan(
        choices=tuple(choices),
        num_layouts=num_layouts,
        num_too_large=num_too_large,
        left_out=tuple(f"{plural(nodes, 'node')} left out: {why}" for nodes, why in left_out.items()),
        changes=_changes(question, choices[-1].nodes),
    )


def _too_large(question: Question, least_bytes: float) -> str:
    machine = question.job.machine
    may = MEMORY_SHARE * machine.memory_bytes
    return (
        f"no layout fits into memory: the smallest needs {least_bytes / 1e9:.1f} GB on a rank, which may use "
        f"{may / 1e9:.1f} of {machine.memory_bytes / 1e9:.0f} GB: add nodes, or restrict layouts less"
    )


def _fits(engine: Engine) -> Bools:
    return np.asarray(engine.memory_bytes <= MEMORY_SHARE * engine.machine.memory_bytes)


def _least_recomputing(layouts: Layouts, order: Ints) -> Ints:
    """Return of layouts, fastest first, those that no other one equals in all but recomputation and overtakes."""
    keys = np.stack([getattr(layouts, name)[order] for name in ("dp", "pp", "tp", "zero", "micro_batch")], axis=1)
    first = np.unique(keys, axis=0, return_index=True)[1]
    return order[np.sort(first)]


def _margin(question: Question, layout: Mapping[str, int], nodes: int) -> float | None:
    """Return by which factor a prediction may be off on either side; None where no measurement says.

    Pipelines and tensor parallelism do not show what replicas exchange, nor each other; replicas show the links of all.
    """
    if question.error is None:
        return None
    if question.max_ranks is not None and nodes * question.job.machine.gpus_per_node > question.max_ranks:
        return None
    if question.measured is None:
        return math.exp(question.error)
    ways, measured = ({name for name in ("pp", "tp") if one[name] > 1} for one in (layout, question.measured))
    if ways == measured:
        return math.exp(question.error)
    return None if measured else math.exp(OTHER_WAYS * question.error)


def _choices(question: Question, layouts: Layouts, nodes: int) -> list[Choice]:
    engine = steps_of(question.job, layouts)
    # Libraries choose between a ring over all ranks and adding up on each node first: the interval holds both.
    other = steps_of(replace(question.job, is_hierarchical=not question.job.is_hierarchical), layouts)
    found = []
    for index in range(len(layouts)):
        margin = _margin(question, layouts.row(index), nodes)
        step_s = float(engine.step_s[index]) * question.correction
        both = step_s, float(other.step_s[index]) * question.correction
        found.append(
            Choice(
                layout=layouts.row(index),
                nodes=nodes,
                num_ranks=int(layouts.num_ranks[index]),
                step_s=step_s,
                low_s=None if margin is None else min(both) / margin,
                high_s=None if margin is None else max(both) * margin,
                tokens=int(layouts.sequences[index]) * question.job.model.sequence,
                memory_bytes=float(engine.memory_bytes[index]),
                network_bytes=float(engine.network_bytes[index]),
                shares={name: float(part[index] / engine.step_s[index]) for name, part in engine.parts_s.items()},
            )
        )
    return found


def _changes(question: Question, nodes: int) -> tuple[Change, ...]:
    """Return what changes would do on a number of nodes, each with the layout that is best with it."""
    job = question.job
    before_s = _best_s(question, job, nodes)
    tried: dict[str, Callable[[], Job]] = {
        "10 times the network": lambda: job.on(job.machine.scaled(network_rate=10)),
        "twice the memory": lambda: job.on(job.machine.scaled(memory_bytes=2)),
        "hierarchical all-reduce, which sums on each node first": lambda: replace(job, is_hierarchical=True),
        "gradients in 2 bytes": lambda: replace(job, gradient_bytes=2),
        "local SGD, which exchanges every 8 steps": lambda: replace(job, sync_every=8),
    }
    if isinstance(job.model, MeasuredModel):
        del tried["gradients in 2 bytes"], tried["twice the memory"]
    if job.sync_every > 1 or not 0 < before_s < math.inf:
        del tried["local SGD, which exchanges every 8 steps"]
    factors = {name: before_s / _best_s(question, made(), nodes) for name, made in tried.items()}
    return tuple(Change(name=name, factor=factor) for name, factor in sorted(factors.items(), key=lambda one: -one[1]))


def _best_s(question: Question, job: Job, nodes: int) -> float:
    layouts = question.layouts(nodes)
    if job.sync_every > 1:
        # State or parameters that replicas share out have to be exchanged in each step.
        layouts = layouts.take(layouts.zero == 0)
    engine = steps_of(job, layouts)
    return float(engine.step_s[_fits(engine)].min(initial=math.inf))
