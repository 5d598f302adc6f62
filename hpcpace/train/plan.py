"""Everything about a training run that can be decided, and refused, before torch is loaded or a message is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcpace.config import TrainConfig
from hpcpace.errors import ConfigError, MeshError
from hpcpace.train.inject import Fault, parse_fault
from hpcpace.train.mesh import Mesh, parse_mesh
from hpcpace.train.presets import GPT2_PRESETS, GPT2Shape


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A run that fits: settings, model, mesh and faults."""

    settings: TrainConfig
    shape: GPT2Shape
    mesh: Mesh
    seq_len: int
    faults: tuple[Fault, ...]

    @property
    def sequences_per_replica(self) -> int:
        """Sequences that one replica trains in a step."""
        return self.settings.batch_size // self.mesh.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train in a step."""
        return self.settings.batch_size * self.seq_len

    def rows(self, place: Mesh) -> slice:
        """Return the rows of the global batch that a rank's replica trains."""
        return slice(place.dp * self.sequences_per_replica, (place.dp + 1) * self.sequences_per_replica)

    def credited_tokens(self, place: Mesh) -> int:
        """Return the tokens of a step that a rank is credited with; over all ranks they add up to `tokens_per_step`."""
        tokens, sharers = self.sequences_per_replica * self.seq_len, self.mesh.pp * self.mesh.tp
        index = place.pp * self.mesh.tp + place.tp
        return tokens * (index + 1) // sharers - tokens * index // sharers

    def facts(self) -> dict[str, Any]:
        """Return what a run records of its model."""
        return {
            "name": "gpt2",
            "preset": self.settings.preset,
            "num_parameters": self.shape.num_parameters,
            "num_layers": self.shape.num_layers,
            "width": self.shape.width,
            "num_heads": self.shape.num_heads,
            "vocabulary": self.shape.vocabulary,
            "seq_len": self.seq_len,
            "dtype": self.settings.dtype,
            "tokens_per_step": self.tokens_per_step,
        }


def plan_training(settings: TrainConfig, world_size: int) -> TrainPlan:
    """Fit settings and world together.

    Raises:
        MeshError: mesh, model, batch and world do not fit.
        ConfigError: a setting is out of range, or a fault cannot be read.
    """
    shape = GPT2_PRESETS[settings.preset]
    mesh = parse_mesh(settings.mesh, world_size)
    shape.check_mesh(mesh)
    _check_batch(settings, mesh)
    seq_len = shape.context if settings.seq_len is None else settings.seq_len
    if seq_len > shape.context:
        raise ConfigError(f"train.seq_len is {seq_len}: preset {settings.preset} reads at most {shape.context} tokens")
    faults = tuple(parse_fault(spec) for spec in settings.inject)
    for fault, spec in zip(faults, settings.inject, strict=True):
        if fault.rank is not None and fault.rank >= world_size:
            raise ConfigError(f"fault {spec!r}: no rank {fault.rank}; the job's ranks are 0 to {world_size - 1}")
    return TrainPlan(settings=settings, shape=shape, mesh=mesh, seq_len=seq_len, faults=faults)


def _check_batch(settings: TrainConfig, mesh: Mesh) -> None:
    batch_size, microbatches = settings.batch_size, settings.microbatches
    if batch_size % mesh.dp:
        raise MeshError(
            f"a batch of {batch_size} sequences cannot be shared out over dp={mesh.dp}: "
            f"take --batch-size {_next_multiple(batch_size, mesh.dp)}"
        )
    if mesh.pp == 1:
        return
    if microbatches < mesh.pp:
        raise MeshError(
            f"{microbatches} microbatches do not fill {mesh.pp} stages: take --microbatches {mesh.pp} or more"
        )
    if batch_size // mesh.dp % microbatches:
        fitting = _next_multiple(batch_size, mesh.dp * microbatches)
        raise MeshError(
            f"a batch of {batch_size} sequences gives each of dp={mesh.dp} replicas {batch_size // mesh.dp}, which "
            f"cannot be cut into {microbatches} microbatches: take --batch-size {fitting}, or other --microbatches"
        )


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor
