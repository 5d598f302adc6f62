"""The shapes of the models, by the name of their preset. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpcpace.errors import MeshError
from hpcpace.train.mesh import Mesh


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

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh over which the model cannot be cut.

        Raises:
            MeshError: more stages than layers, or heads or tokens that cannot be shared out.
        """
        if mesh.pp > self.num_layers:
            raise MeshError(f"mesh {mesh} has more stages than the model has layers ({self.num_layers}): lower pp")
        if self.num_heads % mesh.tp:
            divisors = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise MeshError(f"mesh {mesh}: {self.num_heads} heads cannot be shared out: take tp of {divisors}")
        if self.vocabulary < mesh.tp:
            raise MeshError(f"mesh {mesh}: a vocabulary of {self.vocabulary} is too small: lower tp")

    def stage_layers(self, stage: int, num_stages: int) -> range:
        """Return the layers of a pipeline stage.

        Layers that are left over go to the first stages, because the last one also has the head.
        """
        each, left_over = divmod(self.num_layers, num_stages)
        first = stage * each + min(stage, left_over)
        return range(first, first + each + (stage < left_over))


GPT2_PRESETS = {
    "tiny": GPT2Shape(num_layers=4, width=128, num_heads=4, context=128, vocabulary=256),
    "small": GPT2Shape(num_layers=12, width=768, num_heads=12, context=1024, vocabulary=50257),
}
