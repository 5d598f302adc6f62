"""A transformer as far as its cost depends on it: parameters, operations, bytes moved and bytes kept.

Operations and activations are those of Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
(SC 2021, section 4), and Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys 2023,
sections 4 and 5).
"""

from __future__ import annotations

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.train.settings import GPT2_PRESETS


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a decoder whose layers are all alike.

    Attributes:
        name: in messages.
        num_layers: blocks of attention and MLP.
        hidden: width of the residual stream.
        num_heads: of attention.
        sequence: tokens of a sequence.
        vocabulary: different tokens.
        feedforward: width of the MLP; 0 for four times `hidden`.
        is_tied: whether the head shares the parameters of the token embedding, which a pipeline then has to add up over
            its first and last stage.
        is_attention_fused: whether attention keeps no scores (FlashAttention, Dao et al. 2022).
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    vocabulary: int
    feedforward: int = 0
    is_tied: bool = True
    is_attention_fused: bool = True

    def __post_init__(self) -> None:
        """Refuse a shape that no transformer has.

        Raises:
            ConfigError: a number below 1, or a width that the heads do not divide.
        """
        for name in ("num_layers", "hidden", "num_heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model {self.name}: {name} is {getattr(self, name)}: it must be at least 1")
        if self.hidden % self.num_heads:
            raise ConfigError(
                f"model {self.name}: a hidden size of {self.hidden} cannot be split into {self.num_heads} heads: "
                "choose a number of heads that divides it"
            )

    @property
    def width_of_mlp(self) -> int:
        """Width of the MLP."""
        return self.feedforward or 4 * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        hidden, mlp = self.hidden, self.width_of_mlp
        return 4 * hidden * hidden + 2 * hidden * mlp + 9 * hidden + mlp

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens, and of the head where it is not tied."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, positions and last norm included."""
        heads = 1 if self.is_tied else 2
        return (
            self.num_layers * self.layer_parameters
            + heads * self.embedding_parameters
            + (self.sequence + 2) * self.hidden
        )

    @property
    def matmul_flops(self) -> float:
        """Operations of the forward pass of a layer for a sequence, without the core of attention."""
        return 2.0 * self.sequence * (4 * self.hidden**2 + 2 * self.hidden * self.width_of_mlp)

    @property
    def attention_flops(self) -> float:
        """Operations of the forward pass of the core of attention, which recomputation can repeat alone."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def head_flops(self) -> float:
        """Operations of the forward pass of the head for a sequence."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary


def preset(name: str) -> Transformer | None:
    """Return the transformer of a name such as `gpt2-xl`, or None."""
    shape = GPT2_PRESETS.get(name.removeprefix("gpt2-")) if name.startswith("gpt2-") else None
    if shape is None:
        return None
    return Transformer(
        name=name,
        num_layers=shape.num_layers,
        hidden=shape.width,
        num_heads=shape.num_heads,
        sequence=shape.context,
        vocabulary=shape.vocabulary,
    )


PRESETS = tuple(f"gpt2-{name}" for name in GPT2_PRESETS)


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A model of which only a traced run is known; it can be shared out by data parallelism alone.

    Attributes:
        name: in messages.
        gradient_bytes: that a replica adds up with the others in a step.
        forward_s, backward_s: of a sample on one rank, seconds.
        update_s: of the optimizer, seconds a step.
        num_layers, num_heads, sequence: 1: it is not cut, and its samples are counted as they are.
    """

    name: str
    gradient_bytes: float
    forward_s: float
    backward_s: float
    update_s: float
    num_layers: int = 1
    num_heads: int = 1
    sequence: int = 1


Model = Transformer | MeasuredModel
