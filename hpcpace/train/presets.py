"""The shapes of the models by preset, and the mesh of ranks: data, pipeline, tensor parallelism.

Nothing here needs torch, so a mesh that does not fit is refused before anything slow is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpcpace.core.errors import MeshError

DIMENSIONS = ("dp", "pp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of the three dimensions, or the place of one rank in them.

    Ranks are numbered like the elements of an array of shape (dp, pp, tp) in C order: tensor parallelism, which
    communicates most, is innermost and so stays within a node where it can; data parallelism is outermost.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks that the mesh needs."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Mesh:
        """Return the place of a rank in the mesh."""
        pipeline, tp = divmod(rank, self.tp)
        dp, pp = divmod(pipeline, self.pp)
        return Mesh(dp=dp, pp=pp, tp=tp)

    def rank(self, place: Mesh) -> int:
        """Return the rank at a place: the inverse of `coordinates`."""
        return (place.dp * self.pp + place.pp) * self.tp + place.tp

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by the name of their dimension."""
        return asdict(self)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.as_dict().items())


def parse_mesh(text: str, world_size: int) -> Mesh:
    """Read a mesh like `dp=2,pp=2,tp=1`.

    A dimension that is not named is 1; no text at all means data parallelism over all ranks.

    Raises:
        MeshError: the text is not a mesh, or its product is not the number of ranks.
    """
    if not text.strip():
        return Mesh(dp=world_size)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in DIMENSIONS or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise MeshError(f"mesh {text!r}: cannot read {part.strip()!r}; write sizes from 1 on, like dp=2,pp=2,tp=1")
        if name in sizes:
            raise MeshError(f"mesh {text!r} names {name} twice: write each of dp, pp and tp once")
        sizes[name] = int(value)
    mesh = Mesh(**sizes)
    if mesh.size != world_size:
        raise MeshError(
            f"mesh {mesh} needs {mesh.size} ranks, but the job has {world_size}: change the mesh or the number of ranks"
        )
    return mesh


@dataclass(frozen=True, kw_only=True)
class GPT2Shape:
    """The shape of a GPT-2 (Radford et al. 2019, table 2)."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int
    """Number of different tokens."""

    @property
    def num_parameters(self) -> int:
        """The number of parameters; the head shares those of the token embedding."""
        width = self.width
        # attention 4 w^2 + 4 w, MLP 8 w^2 + 5 w, two layer norms 4 w
        block = 12 * width * width + 13 * width
        return (self.vocabulary + self.context) * width + self.num_layers * block + 2 * width

    def facts(self) -> dict[str, Any]:
        """Return what a run records of the shape."""
        return {
            "name": "gpt2",
            "num_parameters": self.num_parameters,
            "num_layers": self.num_layers,
            "width": self.width,
            "num_heads": self.num_heads,
            "vocabulary": self.vocabulary,
        }

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh over which the model cannot be cut.

        Raises:
            MeshError: more stages than layers, or heads or tokens that cannot be shared out.
        """
        if mesh.pp > self.num_layers:
            raise MeshError(f"mesh {mesh} has more stages than the model has layers ({self.num_layers}): lower pp")
        if self.num_heads % mesh.tp:
            divisors = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise MeshError(f"mesh {mesh}: {self.num_heads} heads cannot be split evenly: use tp of {divisors}")
        if self.vocabulary < mesh.tp:
            raise MeshError(f"mesh {mesh}: a vocabulary of {self.vocabulary} is too small: lower tp")

    def stage_layers(self, stage: int, num_stages: int) -> range:
        """Return the layers of a pipeline stage.

        Layers that are left over go to the first stages, because the last one also has the head.
        """
        each, left_over = divmod(self.num_layers, num_stages)
        first = stage * each + min(stage, left_over)
        return range(first, first + each + (stage < left_over))


@dataclass(frozen=True, kw_only=True)
class ResNetShape:
    """A ResNet of basic blocks for images of 32 x 32 pixels (He et al. 2016).

    ResNet-18 as it is usual for CIFAR-10: four stages of two blocks, behind a 3 x 3 convolution with stride 1 and no
    max-pooling, for 7 x 7 with stride 2 and pooling would leave 8 x 8 pixels.
    """

    widths: tuple[int, ...]
    """Channels of each stage; all but the first halve the image."""
    blocks_per_stage: int
    num_classes: int

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(self.parameter_sizes())

    def parameter_sizes(self) -> list[int]:
        """Return the number of elements of each parameter, in the order of the model's modules."""
        stem = self.widths[0]
        sizes, channels = [3 * stem * 9, stem, stem], stem
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks_per_stage):
                sizes += [channels * width * 9, width, width, width * width * 9, width, width]
                if block == 0 and stage > 0:
                    sizes += [channels * width, width, width]
                channels = width
        return [*sizes, channels * self.num_classes, self.num_classes]

    def facts(self) -> dict[str, Any]:
        """Return what a run records of the shape."""
        return {"name": "resnet18", "num_parameters": self.num_parameters, "num_classes": self.num_classes}

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh over which the model cannot be cut.

        Raises:
            MeshError: pipeline or tensor parallelism.
        """
        if mesh.pp > 1 or mesh.tp > 1:
            raise MeshError(f"mesh {mesh}: resnet18 supports data parallelism only: use dp={mesh.size}, or gpt2")


ModelShape = GPT2Shape | ResNetShape

GPT2_PRESETS = {
    "tiny": GPT2Shape(num_layers=4, width=128, num_heads=4, context=128, vocabulary=256),
    "small": GPT2Shape(num_layers=12, width=768, num_heads=12, context=1024, vocabulary=50257),
    "medium": GPT2Shape(num_layers=24, width=1024, num_heads=16, context=1024, vocabulary=50257),
    "large": GPT2Shape(num_layers=36, width=1280, num_heads=20, context=1024, vocabulary=50257),
    "xl": GPT2Shape(num_layers=48, width=1600, num_heads=25, context=1024, vocabulary=50257),
}
RESNET18 = ResNetShape(widths=(64, 128, 256, 512), blocks_per_stage=2, num_classes=10)
