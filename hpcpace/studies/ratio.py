"""The ratio of communication to computation, and the link rate at which a lab has the ratio of a published set-up.

Slow processors on a fast link represent a cluster of fast GPUs on a slow link only if this ratio is the same. The
published throughput of one GPU and the published traffic determine it before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcpace.studies.setups import Setup
from hpcpace.train.gloo_messages import PacketOverhead, link_volumes, messages, wire_matrix
from hpcpace.train.operations import Operation, master_itemsize
from hpcpace.train.plan import TrainPlan
from hpcpace.train.presets import GPT2Shape
from hpcpace.train.volume import step_operations

_BITS = 8


def bytes_per_sample(network_bps: float, samples_per_s: float) -> float:
    """Return the bytes per sample on a network, from its mean throughput and that of the training: B / (8 R)."""
    return network_bps / _BITS / samples_per_s


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What a set-up communicates and computes.

    Attributes:
        link_bytes_per_sample: bytes a sample in the busier direction of the busiest server's link.
        samples_per_s_of_one: samples a second of a single rank that communicates with nobody.
        num_ranks: that compute.
        link_bps: rate of the link in one direction.
    """

    link_bytes_per_sample: float
    samples_per_s_of_one: float
    num_ranks: int
    link_bps: float

    @property
    def communication_s(self) -> float:
        """Seconds per sample on the link, 8 v / L."""
        return _BITS * self.link_bytes_per_sample / self.link_bps

    @property
    def computation_s(self) -> float:
        """Seconds per sample on all ranks together, 1 / (n R1)."""
        return 1 / (self.num_ranks * self.samples_per_s_of_one)

    @property
    def ratio(self) -> float:
        """Communication over computation, 8 v n R1 / L; above 1 the link is the limit."""
        return self.communication_s / self.computation_s

    @property
    def samples_per_s_without_overlap(self) -> float:
        """Throughput without overlap: 1 / (computation + communication)."""
        return 1 / (self.computation_s + self.communication_s)


def link_rate_bps(ratio: float, *, link_bytes_per_sample: float, samples_per_s_of_one: float, num_ranks: int) -> float:
    """Return the link rate at which a set-up has a given ratio: L = 8 v n R1 / ratio.

    Args:
        ratio: of communication to computation, as of `Balance`.
        link_bytes_per_sample, samples_per_s_of_one, num_ranks: as of `Balance`.
    """
    return _BITS * link_bytes_per_sample * num_ranks * samples_per_s_of_one / ratio


def link_bytes_per_step(setup: Setup, plan: TrainPlan) -> float:
    """Return the bytes of frames per step in the busier direction of the busiest server's link, over gloo.

    docs/network-volume.md has the formula. 0 on one server.

    Args:
        setup: says which ranks are on one server: the first ones are on the first.
        plan: of its training.
    """
    num_ranks = setup.layout.num_ranks
    if setup.layout.servers == 1:
        return 0.0
    hosts = [str(rank // setup.layout.ranks_per_server) for rank in range(num_ranks)]
    volumes = link_volumes(wire_matrix(messages(_operations(plan)), num_ranks, PacketOverhead()), hosts)
    return float(max(max(volume.tx_bytes, volume.rx_bytes) for volume in volumes.values()))


def _operations(plan: TrainPlan) -> list[Operation]:
    if isinstance(plan.shape, GPT2Shape):
        return step_operations(plan)
    size = plan.shape.num_parameters * master_itemsize(plan)
    ranks = tuple(range(plan.mesh.size))
    return [
        Operation(kind="all_reduce", cause="gradients", ranks=ranks, size_bytes=size, itemsize=master_itemsize(plan))
    ]


def predicted_step_s(setup: Setup, plan: TrainPlan, *, samples_per_s_of_one: float, link_bps: float) -> float:
    """Return the step time without overlap of computation and communication, with all ranks busy."""
    computation_s = plan.samples_per_step / (setup.layout.num_ranks * samples_per_s_of_one)
    return computation_s + _BITS * link_bytes_per_step(setup, plan) / link_bps
