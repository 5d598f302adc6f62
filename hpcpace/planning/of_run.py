"""What a traced run says about a plan: its model and layout, how fast its ranks compute, and how fast its links are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any

import numpy as np

from hpcpace.core.codec import Text, WrongValue, convert, read_json
from hpcpace.core.errors import CannotTell
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural
from hpcpace.diagnosis.clocks import ClockThresholds, are_exits_early
from hpcpace.diagnosis.devices import has_device
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.frames.columns import Columns, Texts
from hpcpace.frames.run import Run
from hpcpace.metrics import Floats
from hpcpace.metrics.communication import union_ns
from hpcpace.metrics.phases import Part
from hpcpace.metrics.resampling import MIN_STEPS
from hpcpace.planning.engine import Job
from hpcpace.planning.files import Size, read_machine
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import KnownMachine, Machine
from hpcpace.planning.model import MeasuredModel, Model, Transformer
from hpcpace.planning.steps import steps_of

_MIN_BYTES = 1 << 16  # statistics: of an operation whose rate counts; smaller ones show latency
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_RINGS = (*_REDUCTIONS, "all_gather")
_UNPLANNED = ("int8", "powersgd")
_MAX_UNEXPLAINED = 1.0  # statistics: logarithmic, a factor of 2.7; beyond it, predictions would be mostly correction
_WITHIN_REPLICAS = ("send", "recv", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class RecordedModel:
    """The model of a reference workload as run.json has it; empty for other scripts."""

    name: Text = ""
    num_layers: Size = 0
    width: Size = 0
    num_heads: Size = 0
    vocabulary: Size = 0
    seq_len: Size = 0
    preset: Text = ""
    dtype: Text = ""


@dataclass(frozen=True, kw_only=True)
class RecordedParallelism:
    """How it was shared out."""

    microbatches: Size | None = None
    zero: Size = 0
    overlap: bool | None = None
    compress: Text | None = None
    sync_every: Size | None = None
    schedule: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """What run.json has of both."""

    model: RecordedModel = field(default_factory=RecordedModel)
    parallelism: RecordedParallelism = field(default_factory=RecordedParallelism)
    samples_unit: Text = ""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run as a plan needs it.

    Attributes:
        job: its model, on a machine with the constants that the run shows.
        layout: one row.
        nodes: of the run.
        step_s: median step.
        batch: sequences, or samples, of a step.
        has_network: whether it shows how fast nodes send to each other.
        correction: measured over predicted step: what the constants do not explain, such as jitter and waits.
        error: half-width of predictions, logarithmic; None where the run does not say.
        spread: by which own work differs between ranks in single steps, standard deviation over mean.
        remarks: what it does not show, a sentence each.
    """

    job: Job
    layout: Layouts
    nodes: int
    step_s: float
    batch: int
    has_network: bool
    correction: float
    error: float | None
    spread: float
    remarks: tuple[str, ...]

    @property
    def known(self) -> KnownMachine:
        """The machine of the run."""
        return KnownMachine(machine=self.job.machine, error=self.error, remarks=self.remarks)


def measure_run(run: Run, model: Transformer | None) -> PlannedRun:
    """Return what a run says about a plan; constants that it does not show are those of a100, or of cpu.

    Args:
        run: opened.
        model: that it trained, if run.json does not say it.

    Raises:
        CannotTell: it hung, lacks ranks, phases or clocks, or trains in parts a model that is not known.
    """
    judged = run.judged
    _check(judged)
    problems: list[str] = []
    recorded = read_json(judged.attempt, judged.attempt.run_json.name, _recorded, problems) or RecordedJob()
    if problems:
        raise CannotTell(f"what the run trained is not known: {problems[0]}")
    (ranks,) = run.columns("ranks")
    sizes = {name: int(np.asarray(ranks[name]).max()) + 1 for name in ("dp", "pp", "tp")}
    num_ranks = len(np.asarray(ranks["rank"]))
    if math.prod(sizes.values()) != num_ranks:
        sizes = {"dp": num_ranks, "pp": 1, "tp": 1}
    steps, parts = _table(run, "steps"), _table(run, "parts")
    samples = int(np.median(steps["samples"]))
    shape = _transformer(recorded.model)
    if model is not None:
        _check_named(model, shape, recorded, samples)
        shape = shape or model
    per_node = int(np.bincount(np.asarray(ranks["node"])).max())
    base = read_machine("a100" if any(map(has_device, judged.credible.traces)) else "cpu").machine
    machine = replace(base, name=f"ranks like those of the run ({base.name})", gpus_per_node=per_node)
    own_s = _own_work_s(parts, num_ranks)
    if shape is None:
        if sizes["pp"] * sizes["tp"] > 1:
            raise CannotTell("the run shares out a model that its record does not describe: name it with --model")
        if samples < sizes["dp"]:
            raise CannotTell("the run does not record how many samples a step has: call session.step(samples=...)")
        found: Model = _measured_model(run, own_s, samples / sizes["dp"], num_ranks)
        sequences = samples
    else:
        found, sequences = shape, max(samples // shape.sequence, 1)
    layout, job = _layout(sizes, sequences, recorded), _job(found, machine, recorded)
    machine, has_network = _machine_of(run, job, layout, own_s, np.asarray(ranks["node"]))
    # Only some steps of local SGD exchange.
    step_s = float((np.mean if job.sync_every > 1 else np.median)(steps["step_time_ns"])) / 1e9
    correction = step_s / float(steps_of(job.on(machine), layout).step_s[0])
    return PlannedRun(
        job=job.on(machine),
        layout=layout,
        nodes=judged.measured.places.num_nodes,
        step_s=step_s,
        batch=sequences,
        has_network=has_network,
        correction=correction,
        error=_error(correction, job, run.num_steps),
        spread=_spread(parts, num_ranks),
        remarks=(*_assumed(recorded, sizes["dp"], run.num_steps), *_remarks(base)),
    )


def _job(model: Model, machine: Machine, recorded: RecordedJob) -> Job:
    """Return the job that a run was.

    Raises:
        CannotTell: it compressed gradients in a way that no plan knows.
    """
    how = recorded.parallelism
    if how.compress in _UNPLANNED:
        raise CannotTell(f"the run compresses its gradients by {how.compress}, which no plan knows: trace one without")
    # Reference workloads keep parameters and gradients in float32, whatever they compute in.
    gradient_bytes = 2 if how.compress in ("fp16", "bf16") else 4 if recorded.model.name == "gpt2" else 0
    return Job(
        model=model,
        machine=machine,
        overlaps=how.overlap is not False,
        gradient_bytes=gradient_bytes,
        sync_every=max(how.sync_every or 1, 1),
        is_synced_by_stage=recorded.model.name == "gpt2",
    )


def _error(correction: float, job: Job, num_steps: int) -> float | None:
    """Return how far off predictions may be, logarithmic; None where the run does not say.

    Raises:
        CannotTell: the constants explain too little of the run's own step.
    """
    unexplained = abs(math.log(correction))
    if unexplained > _MAX_UNEXPLAINED:
        raise CannotTell(
            f"a step of the run takes {correction:.2g} times what its computation and links explain: it trains another "
            "model than the one named, or waits for something else; see `hpcpace report`"
        )
    # Steps of local SGD are of two kinds, so that their mean shows neither. In other runs, what the constants do not
    # explain here may be another share.
    return None if job.sync_every > 1 or num_steps < MIN_STEPS else max(_table_error(), unexplained)


def _remarks(base: Machine) -> tuple[str, ...]:
    """Return what a run does not show."""
    if not base.has_gpus:
        return ("the memory of a rank is not known: set it with --gpu-memory",)
    return (f"a rank is taken to have {base.memory_bytes / 1e9:.0f} GB of memory: set it with --gpu-memory",)


def _assumed(recorded: RecordedJob, num_replicas: int, num_steps: int) -> tuple[str, ...]:
    """Return what a run leaves open."""
    how, found = recorded.parallelism, []
    if num_steps < MIN_STEPS:
        found.append(f"{plural(num_steps, 'used step')} of the run: trace {MIN_STEPS} or more to get intervals")
    if (how.sync_every or 1) > 1:
        found.append("steps of local SGD are of two kinds, so that the run does not say how far off predictions are")
    if how.overlap is None and num_replicas > 1:
        found.append("the run does not record whether gradients are exchanged while backward runs: assumed they are")
    return tuple(found)


def _table_error() -> float:
    """Return how far off predictions of published steps were, logarithmic (docs/results/plan.md)."""
    error = read_machine("a100").error
    assert error is not None
    return error


def _check_named(model: Transformer, recorded: Transformer | None, job: RecordedJob, samples: int) -> None:
    """Refuse a model that the run did not train.

    Raises:
        CannotTell: its record has another one, or its samples are no sequences of this one.
    """
    if recorded is not None and replace(recorded, name=model.name) != model:
        raise CannotTell(f"the run trained {recorded.name}, and not {model.name}: drop --model, or the run")
    other = job.model.name if recorded is None else ""
    if other or (samples % model.sequence or not samples) or job.samples_unit not in ("", "samples", "tokens"):
        named = f", and its record names {other}" if other else ""
        raise CannotTell(
            f"a step of the run has {samples} {job.samples_unit or 'samples'}{named}, which are no sequences of "
            f"{model.name} ({model.sequence} tokens): drop the run, or record tokens by session.step(samples=...)"
        )


def _recorded(content: Any) -> RecordedJob:
    # A script of the user's may record a model in words of its own.
    found = {name: content.get(name) for name in ("model", "parallelism")}
    parts = {name: value for name, value in found.items() if isinstance(value, dict)}
    try:
        return convert({**parts, "samples_unit": content.get("samples_unit", "")}, RecordedJob)
    except WrongValue:
        return RecordedJob()


def _check(judged: JudgedAttempt) -> None:
    """Refuse a run from which no plan follows.

    Raises:
        CannotTell: see `measure_run`.
    """
    judged.check_whole()
    measured = judged.measured
    if measured.unknown:
        raise CannotTell(f"the run does not show what its steps are spent on: {measured.unknown}")
    wrong = measured.clocks.num_wrong or are_exits_early(measured.clocks, judged.limits(ClockThresholds))
    if wrong or measured.timed.unknown_clocks:
        raise CannotTell("clocks of the run are wrong or unknown, so that its transfers are not known: trace it again")


def _table(run: Run, name: str) -> dict[str, Floats]:
    blocks = list(run.columns(name))
    return {
        key: np.concatenate([np.asarray(block[key], np.float64) for block in blocks])
        for key, value in blocks[0].items()
        if isinstance(value, np.ndarray)
    }


def _own_work_s(parts: dict[str, Floats], num_ranks: int) -> dict[str, float]:
    """Return forward, backward and optimizer of the rank that computes most, seconds a step, median over steps."""
    names = [Part.FORWARD.name.lower(), Part.BACKWARD.name.lower(), Part.OPTIMIZER.name.lower()]
    by_rank = [parts[f"{name}_ns"].reshape(-1, num_ranks) for name in names]
    medians = [np.median(one, axis=0) for one in by_rank]
    most = int(np.argmax(medians[0] + medians[1]))
    return {name: float(median[most]) / 1e9 for name, median in zip(names, medians, strict=True)}


def _spread(parts: dict[str, Floats], num_ranks: int) -> float:
    """Return by which own work differs between ranks in single steps, standard deviation over mean.

    What lasts on a rank, and what a step has on all ranks, does not grow with their number.
    """
    own_ns = sum(parts[f"{part.name.lower()}_ns"] for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER))
    by_step = np.asarray(own_ns, np.float64).reshape(-1, num_ranks)
    single = by_step - by_step.mean(axis=0) - by_step.mean(axis=1, keepdims=True) + by_step.mean()
    freedom = (len(by_step) - 1) * (num_ranks - 1)
    return math.sqrt(float((single**2).sum()) / freedom) / float(by_step.mean()) if freedom and by_step.any() else 0.0


def _transformer(recorded: RecordedModel) -> Transformer | None:
    if not (recorded.num_layers and recorded.width and recorded.num_heads and recorded.seq_len):
        return None
    return Transformer(
        name="-".join(filter(None, (recorded.name, recorded.preset))) or "the model",
        num_layers=recorded.num_layers,
        hidden=recorded.width,
        num_heads=recorded.num_heads,
        sequence=recorded.seq_len,
        vocabulary=max(recorded.vocabulary, 1),
    )


def _layout(sizes: dict[str, int], sequences: int, recorded: RecordedJob) -> Layouts:
    num_micro = max(recorded.parallelism.microbatches or 1, 1)
    return Layouts.of(
        **sizes,
        zero=min(recorded.parallelism.zero, 3),
        num_micro=num_micro,
        micro_batch=max(sequences // sizes["dp"] // num_micro, 1),
        interleave=2 if recorded.parallelism.schedule == "interleaved" and sizes["pp"] > 1 else 1,
        element_bytes=2 if recorded.model.dtype in ("bfloat16", "float16") else 4,
    )


def _measured_model(run: Run, own_s: dict[str, float], samples: float, num_ranks: int) -> MeasuredModel:
    """Return the model of a script: what a sample takes, and what replicas exchange.

    Raises:
        CannotTell: ranks exchange other things than gradients of all replicas.
    """
    exchanged: dict[int, float] = defaultdict(float)
    for block in run.columns("collectives"):
        is_reduced = _is_op(block, _REDUCTIONS)
        is_large = np.asarray(block["size_bytes"]) >= _MIN_BYTES
        is_partial = is_reduced & is_large & (np.asarray(block["group_size"]) < num_ranks)
        if is_partial.any() or _is_op(block, _WITHIN_REPLICAS).any():
            raise CannotTell(
                "ranks of the run share out a model that its record does not describe: name it with --model"
            )
        rank, size_bytes = np.asarray(block["rank"]), np.asarray(block["size_bytes"], np.float64)
        for one in np.unique(rank[is_reduced]).tolist():
            exchanged[one] += float(size_bytes[is_reduced & (rank == one)].sum())
    per_step = max(exchanged.values(), default=0.0) / max(run.num_steps, 1)
    return MeasuredModel(
        name="the model of the run",
        gradient_bytes=per_step,
        forward_s=own_s["forward"] / samples,
        backward_s=own_s["backward"] / samples,
        update_s=own_s["optimizer"],
    )


def _is_op(block: Columns, names: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    op = block["op"]
    assert isinstance(op, Texts)
    return np.isin(op.code, [code for code, name in enumerate(op.names) if name in tuple(names)])


def _machine_of(run: Run, job: Job, layout: Layouts, own_s: dict[str, float], node: Floats) -> tuple[Machine, bool]:
    """Return the machine that computes and sends as a run did, and whether it shows the network between nodes."""
    machine = job.machine
    if isinstance(job.model, Transformer):
        predicted_s = float(steps_of(job, layout).compute_s[0])
        slower = (own_s["forward"] + own_s["backward"]) / predicted_s
        machine = machine.scaled(flops=1 / slower, memory_rate=1 / slower, layer_s=slower)
    rates = _rates(run, node)
    beside = machine.gpus_per_node
    for name, leaves in (("network_rate", True), ("node_rate", False)):
        if leaves in rates:
            rate, local = rates[leaves]
            whole = rate * max(beside // local, 1) if leaves else rate
            machine = machine.scaled(**{name: whole / getattr(machine, name)})
    return machine, True in rates


def _rates(run: Run, node: Floats) -> dict[bool, tuple[float, int]]:
    """Return bus bytes per second of groups that leave their node (True) and of others, and their ranks on a node.

    Operations of a group that run at once share its links, as those of DDP's buckets over gloo do.
    """
    moved: dict[int, float] = defaultdict(float)
    time_s: dict[int, float] = defaultdict(float)
    members: dict[int, set[int]] = defaultdict(set)
    for block in run.columns("collectives"):
        group, rank = np.asarray(block["group_id"]), np.asarray(block["rank"])
        size_bytes = np.asarray(block["size_bytes"], np.float64)
        rate = np.asarray(block["bus_bytes_per_s"], np.float64)
        took_ns, ends_ns = (np.asarray(block[name], np.float64) for name in ("operation_transfer_ns", "exit_ns"))
        is_ring = _is_op(block, _RINGS)
        for one in np.unique(group).tolist():
            mine = group == one
            members[one] |= set(np.unique(rank[mine]).tolist())
            # How fast a message is handed over says little of how fast a ring is.
            large = mine & is_ring & (size_bytes >= _MIN_BYTES) & np.isfinite(rate) & (rate > 0)
            moved[one] += float((rate[large] * took_ns[large]).sum()) / 1e9
            for one_rank in np.unique(rank[large]).tolist():
                own = large & (rank == one_rank)
                time_s[one] += union_ns(ends_ns[own] - took_ns[own], ends_ns[own]) / 1e9
    found: dict[bool, list[tuple[float, float, int]]] = defaultdict(list)
    for one, ranks in members.items():
        if time_s[one] > 0 and len(ranks) > 1:
            nodes = np.asarray(node)[sorted(ranks)]
            local = int(np.bincount(nodes.astype(np.int64)).max())
            found[bool(len(np.unique(nodes)) > 1)].append((moved[one], time_s[one], local))
    return {
        leaves: (sum(one[0] for one in some) / sum(one[1] for one in some), max(one[2] for one in some))
        for leaves, some in found.items()
    }
