"""Which parameters a rank holds, in the order of the model's modules; nothing here needs torch."""

from __future__ import annotations

import math

from hpcpace.errors import ConfigError
from hpcpace.train.mesh import Mesh
from hpcpace.train.plan import TrainPlan
from hpcpace.train.presets import GPT2Shape

Shape = tuple[int, ...]


def gpt2_shape(plan: TrainPlan) -> GPT2Shape:
    """Return the shape of the plan's GPT-2.

    Raises:
        ConfigError: the plan is one for another model.
    """
    if not isinstance(plan.shape, GPT2Shape):
        raise ConfigError(f"the network volume of {plan.settings.model} has no formula: use gpt2, or measure it")
    return plan.shape


def parameter_sizes(plan: TrainPlan, place: Mesh) -> list[int]:
    """Return the number of elements of each parameter that a rank holds before replicas share any out."""
    return [math.prod(shape) for stage in plan.stages_of(place) for shape in stage_parameters(plan, stage, place.tp)]


def stage_parameters(plan: TrainPlan, stage: int, tp: int) -> list[Shape]:
    """Return the shape of each parameter of a stage, or of the piece of it that a rank of tensor parallelism holds."""
    return [shape for piece in stage_pieces(plan, stage, tp) for shape in piece]


def stage_pieces(plan: TrainPlan, stage: int, tp: int) -> list[list[Shape]]:
    """Return the shapes of a stage's parameters by the part of the model: embedding, blocks, head.

    The head has no separate weight if it shares that of the embedding.
    """
    shape, num_tp = gpt2_shape(plan), plan.mesh.tp
    width, cut = shape.width, shape.width // num_tp
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * cut, width), (3 * cut,), (width, cut), (width,)]
    mlp: list[Shape] = [(4 * cut, width), (4 * cut,), (width, 4 * cut), (width,)]
    # DTensor cuts like torch.chunk: the last piece of the vocabulary may be smaller, or empty.
    rows = math.ceil(shape.vocabulary / num_tp)
    vocabulary: Shape = (min(rows, max(0, shape.vocabulary - tp * rows)), width)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    pieces: list[list[Shape]] = [[vocabulary, (shape.context, width)]] if is_first else []
    pieces += [[*norm, *attention, *norm, *mlp] for _ in shape.stage_layers(stage, plan.num_stages)]
    if is_last:
        pieces.append(norm if is_first else [*norm, vocabulary])
    return pieces


def sharded_units(plan: TrainPlan, stage: int, tp: int) -> list[list[Shape]]:
    """Return the parameters of a stage as `--zero 3` sends them: what belongs to no other unit, then each block.

    A head on a stage of its own is a unit, too; one that shares its weight with the embedding goes along with that.
    """
    pieces = stage_pieces(plan, stage, tp)
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    if is_first and is_last:
        return [[*pieces[0], *pieces[-1]], *pieces[1:-1]]
    return pieces
