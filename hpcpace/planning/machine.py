"""A machine as far as the cost of a step depends on it: processors, memory, and the links within and between nodes.

Its links may come from a probe.
"""

from __future__ import annotations

from dataclasses import fields, replace

from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass
from hpcpace.probe.record import LatencyLaw, ProbeRecord

_LARGE_BYTES = 64e6  # statistics: of a probe's all-reduce whose rate counts, unless it ended below


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
        num_nics: adapters of a node, each of which has as much of `network_rate`; a rank sends through one of them.
        oversubscription: what the nodes below a leaf switch can send over what its uplinks carry.
        leaf_nodes: neighbouring nodes below one leaf switch; 1 if any two nodes may be below different ones.
        has_gpus: whether its processors are GPUs, and not CPU ranks.
        is_of_rings: whether `network_rate` was found from collectives taken as rings, so that predictions take them so.
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
    num_nics: int = 1
    oversubscription: float = 1.0
    leaf_nodes: int = 1
    has_gpus: bool = True
    is_of_rings: bool = False

    def __post_init__(self) -> None:
        """Refuse a machine that no step ends on.

        Raises:
            ConfigError: a rate or number that is 0 or less, or a time below 0.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not (value >= 0 if field.name.endswith("_s") else value > 0):
                least = "0 or more" if field.name.endswith("_s") else "more than 0"
                raise ConfigError(f"machine {self.name}: {field.name} is {value}: it must be {least}")

    def scaled(self, **factors: float) -> Machine:
        """Return this machine with some constants multiplied."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


@dataclass(frozen=True, kw_only=True)
class KnownMachine:
    """A machine and how well it is known.

    Attributes:
        machine: its constants.
        error: half-width of a prediction, logarithmic; None where no measurement says.
        remarks: what rests on no measurement, a sentence each.
    """

    machine: Machine
    error: float | None
    remarks: tuple[str, ...] = ()

    def unmeasured(self, machine: Machine, what: str) -> KnownMachine:
        """Return another machine, of which `what` rests on no measurement, so that predictions have no interval."""
        return KnownMachine(machine=machine, error=None, remarks=(f"{what} rests on no measurement", *self.remarks))


def with_links(known: KnownMachine, probe: ProbeRecord) -> KnownMachine:
    """Return a machine with the links of a probe: from the all-reduce over most nodes, and within one node.

    A remark names what the probe does not show.
    """
    laws = {law.num_nodes: law for law in probe.laws if law.op == "all_reduce" and law.num_ranks > 1}
    machine, remarks = known.machine, list(known.remarks)
    over_nodes = [num for num in laws if num > 1]
    if over_nodes:
        law = laws[max(over_nodes)]
        rate, latency_s = _link(law, law.num_nodes)
        machine = replace(machine, network_rate=rate, network_latency_s=latency_s, is_of_rings=True)
    else:
        remarks.append("the probe has no all-reduce between nodes: that rate is that of a known machine")
    if 1 in laws:
        rate, latency_s = _link(laws[1], laws[1].num_ranks)
        machine = replace(machine, node_rate=rate, node_latency_s=latency_s)
    return replace(known, machine=machine, remarks=tuple(remarks))


def _link(law: LatencyLaw, num_parts: int) -> tuple[float, float]:
    """Return bytes per second of a link, and its latency in seconds, from an all-reduce: 2 (n - 1) / n of its bytes.

    Args:
        law: of the all-reduce.
        num_parts: what the links join: nodes, each of which sends what all of its ranks have in one ring, or ranks.
    """
    size_bytes = min(_LARGE_BYTES, float(law.most_bytes))
    ranks = law.num_ranks
    sent = 2 * (ranks - 1) / ranks * size_bytes
    small_ns = law.time_ns(float(law.least_bytes))
    moved_ns = max(law.time_ns(size_bytes) - small_ns, 1.0)
    return sent / moved_ns * 1e9, small_ns / 1e9 / (2 * (num_parts - 1))
