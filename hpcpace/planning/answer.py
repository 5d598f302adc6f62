"""The layouts of a job that are worth a look: the fastest ones that fit into memory, and what would help them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpcpace.core.errors import CannotTell, ConfigError
from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, plural
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.special import ndtri
from hpcpace.planning import CHANGES
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
_OF_A_SCRIPT = "a traced script does not show it: name its model with --model"
_UNTRIED = {
    "nodes": f"twice as many are more than {MAX_GROWTH} times those of the run",
    "layout": "there is no run with a layout of its own",
    "local-sgd": "the run does it already",
    "precision": "the plan is not for float32, or for a traced script, which does not show it",
}
"""Why changes of a kind are not tried; other kinds of a script alone."""
NOT_MEASURED = "nothing measured says how far off these predictions are"
"""Why there is no interval where a remark on the machine has the reason."""
_WAYS = {"pp": "a pipeline", "tp": "tensor parallelism"}
_BILLION = 1e9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, predicted.

    Attributes:
        layout: the numbers of its columns in `Layouts`.
        nodes: of the job.
        num_ranks: of the job.
        step_s: time of a step, and the interval around it; `low_s` and `high_s` are None where no measurement says.
        why_unknown: why there is no interval; empty where there is one.
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
    why_unknown: str
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
class PlannedChange:
    """What a change would do to the best layout's throughput.

    Attributes:
        kind: one of `CHANGES`.
        name: of the change.
        factor: throughput with it over throughput without; 0 where no layout fits.
    """

    kind: str
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
        untried: kinds of changes that cannot be tried, a sentence each.
    """

    choices: tuple[Choice, ...]
    num_layouts: int
    num_too_large: int
    left_out: tuple[str, ...]
    changes: tuple[PlannedChange, ...]
    untried: tuple[str, ...] = ()

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
        spread: by which own work differs between the ranks of that run in single steps, relative to it.
        what: which of `CHANGES` are tried.
    """

    job: Job
    nodes: Sequence[int]
    batch: int
    only: Mapping[str, Sequence[int]]
    error: float | None
    correction: float = 1.0
    max_ranks: int | None = None
    measured: Mapping[str, int] | None = None
    spread: float = 0.0
    what: Sequence[str] = CHANGES

    def with_only(self, **values: int) -> Question:
        """Return the question with one value of some columns."""
        return replace(self, only={**self.only, **{name: (value,) for name, value in values.items()}})

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
        changes=(changes := _changes(question, choices[-1].nodes)),
        untried=tuple(
            f"{kind} not tried: {_UNTRIED.get(kind, _OF_A_SCRIPT)}"
            for kind in question.what
            if kind not in {change.kind for change in changes}
        ),
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


def _margin(question: Question, layout: Mapping[str, int], nodes: int) -> float | str:
    """Return by which factor a prediction may be off on either side, or why that is not known.

    Pipelines and tensor parallelism do not show what replicas exchange, nor each other; replicas show the links of all.
    """
    if question.error is None:
        return NOT_MEASURED
    if question.max_ranks is not None and nodes * question.job.machine.gpus_per_node > question.max_ranks:
        return f"more than {question.max_ranks} ranks, {MAX_GROWTH} times those of the measured steps"
    if question.measured is None:
        return math.exp(question.error)
    ways, measured = ({name for name in ("pp", "tp") if one[name] > 1} for one in (layout, question.measured))
    if ways == measured:
        return math.exp(question.error)
    if not measured:
        return math.exp(OTHER_WAYS * question.error)
    shown, planned = (listed([_WAYS[name] for name in sorted(one)]) or "replicas alone" for one in (measured, ways))
    return f"a run with {shown} does not show what {planned} would exchange"


def _jitter_s(question: Question, engine: Engine, index: int) -> float:
    """Return how much longer the slowest of a layout's ranks works in a step, because it has more ranks than the run.

    The mean largest of k independent normal values is about their (k - 3/8) / (k + 1/4) quantile (Blom 1958).
    """
    if question.measured is None:
        return 0.0
    now, then = (
        float(ndtri((num - 0.375) / (num + 0.25)))
        for num in (_num_ranks(question.measured), int(engine.layouts.num_ranks[index]))
    )
    return question.spread * float(engine.compute_s[index]) * max(then - now, 0.0)


def _num_ranks(layout: Mapping[str, int]) -> int:
    return layout["dp"] * layout["pp"] * layout["tp"]


def _choices(question: Question, layouts: Layouts, nodes: int) -> list[Choice]:
    engine = steps_of(question.job, layouts)
    # Libraries choose between a ring over all ranks and adding up on each node first: the interval holds both.
    both_s = [steps_of(replace(question.job, is_hierarchical=first), layouts).step_s for first in (False, True)]
    found = []
    for index in range(len(layouts)):
        margin = _margin(question, layouts.row(index), nodes)
        step_s = float(engine.step_s[index]) * question.correction
        both = [float(one[index]) * question.correction for one in both_s]
        found.append(
            Choice(
                layout=layouts.row(index),
                nodes=nodes,
                num_ranks=int(layouts.num_ranks[index]),
                step_s=step_s,
                low_s=None if isinstance(margin, str) else min(both) / margin,
                high_s=None if isinstance(margin, str) else max(both) * margin + _jitter_s(question, engine, index),
                why_unknown=margin if isinstance(margin, str) else "",
                tokens=int(layouts.sequences[index]) * question.job.model.sequence,
                memory_bytes=float(engine.memory_bytes[index]),
                network_bytes=float(engine.network_bytes[index]),
                shares={name: float(part[index] / engine.step_s[index]) for name, part in engine.parts_s.items()},
            )
        )
    return found


def _changes(question: Question, nodes: int) -> tuple[PlannedChange, ...]:
    """Return what changes would do on a number of nodes, each with the layout that is best with it."""
    before_s = _best_s(question, nodes)
    if not 0 < before_s < math.inf:
        return ()
    found: list[PlannedChange] = []
    for kind in question.what:
        if (tried := _tried(question, nodes, kind)) is not None:
            name, after_s = tried
            found.append(PlannedChange(kind=kind, name=name, factor=before_s / after_s))
    if "layout" in question.what and question.measured is not None:
        found.append(_of_layout(question, question.measured))
    return tuple(sorted(found, key=lambda one: -one.factor))


def _tried(question: Question, nodes: int, kind: str) -> tuple[str, float] | None:
    """Return the name of a change, and how long a step takes with it; None where it cannot be tried.

    What a traced script takes with other numbers, or without some of its activations, was not measured.
    """
    job, is_script = question.job, isinstance(question.job.model, MeasuredModel)
    name, changed = "", question
    match kind:
        case "network":
            name = "10 times the network"
            changed = replace(question, job=job.on(job.machine.scaled(network_rate=10)))
        case "hierarchical":
            name = "hierarchical all-reduce, which sums on each node first"
            changed = replace(question, job=replace(job, is_hierarchical=True))
        case "local-sgd" if job.sync_every == 1:
            name = "local SGD, which exchanges every 8 steps"
            changed = replace(question, job=replace(job, sync_every=8))
        case "memory" if not is_script:
            name = "twice the memory"
            changed = replace(question, job=job.on(job.machine.scaled(memory_bytes=2)))
        case "compression" if not is_script:
            name, changed = "gradients in 2 bytes", replace(question, job=replace(job, gradient_bytes=2))
        case "precision" if not is_script and question.only.get("element_bytes") == (4,):
            name = "bfloat16, if products take half as long in it"
            changed = question.with_only(element_bytes=2)
        case "checkpointing" if not is_script:
            name = "all activations recomputed in the backward pass"
            changed = question.with_only(recompute=int(Recompute.FULL))
        case "nodes" if _is_near(question, 2 * nodes):
            name, nodes = f"{2 * nodes} nodes", 2 * nodes
    return (name, _best_s(changed, nodes)) if name else None


def _is_near(question: Question, nodes: int) -> bool:
    num_ranks = nodes * question.job.machine.gpus_per_node
    return question.measured is None or num_ranks <= MAX_GROWTH * _num_ranks(question.measured)


def _of_layout(question: Question, measured: Mapping[str, int]) -> PlannedChange:
    """Return what the best layout on the nodes of the run would do beside its own."""
    nodes = _num_ranks(measured) // question.job.machine.gpus_per_node
    own_s = float(steps_of(question.job, Layouts.of(**measured)).step_s[0])
    name = f"the best layout on the {plural(nodes, 'node')} of the run instead of its own"
    return PlannedChange(kind="layout", name=name, factor=own_s / _best_s(question, max(nodes, 1)))


def _best_s(question: Question, nodes: int) -> float:
    """Return how long a step takes with the best layout on a number of nodes; infinite where none fits."""
    try:
        layouts = question.layouts(nodes)
    except ConfigError:
        return math.inf
    if question.job.sync_every > 1:
        # State or parameters that replicas share out have to be exchanged in each step.
        layouts = layouts.take(layouts.zero == 0)
    engine = steps_of(question.job, layouts)
    return float(engine.step_s[_fits(engine)].min(initial=math.inf))
