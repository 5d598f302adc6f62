"""A machine as far as the cost of a step depends on it: processors, memory, and the links within and between nodes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hpcpace.core.errors import ConfigError

FITTED = ("flops", "memory_rate", "layer_s", "node_rate", "node_latency_s", "network_rate", "network_latency_s")
"""The constants of a machine that measurements give."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Processors (GPUs, or CPU ranks) in equal nodes, and what they reach, not their data sheet.

    Attributes:
        name: in messages.
        gpus_per_node: processors of a node.
        memory_bytes: of a processor.
        flops: operations a second that large matrix products reach.
        memory_rate: bytes a second that elementwise operations move.
        layer_s: time of a layer's pass that does not shrink with its work, in seconds: launches of kernels.
        node_rate: bytes a second that a processor sends to others of its node, while all do.
        node_latency_s: of a message within a node.
        network_rate: bytes a second that a node sends to other nodes, all its processors together, in one direction.
        network_latency_s: of a message between nodes.
    """

    name: str
    gpus_per_node: int
    memory_bytes: float
    flops: float
    memory_rate: float
    node_rate: float
    network_rate: float
    layer_s: float = 0.0
    node_latency_s: float = 10e-6
    network_latency_s: float = 20e-6

    def __post_init__(self) -> None:
        """Refuse a machine that no step ends on.

        Raises:
            ConfigError: a rate or number that is 0 or less, or a time below 0.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (value >= 0 if field.name.endswith("_s") else value > 0):
                least = "0 or more" if field.name.endswith("_s") else "more than 0"
                raise ConfigError(f"machine {self.name}: {field.name} is {value}: it must be {least}")

    def scaled(self, **factors: float) -> Machine:
        """Return this machine with some constants multiplied."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})
