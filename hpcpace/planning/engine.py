"""The step of a layout on a machine: what all models share, which is where ranks are and what they send each other.

Collectives are rings whose slowest edge decides, within a node or through its network (Thakur et al. 2005), or first
add up on each node. All layouts are computed at once; `steps` adds the work of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import Machine
from hpcpace.planning.model import Model

# format: buckets of DistributedDataParallel: the first of a backward pass is small, and is sent early; the last cannot
# overlap
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2.0**20, 25e6


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned: a model on a machine, and the habits of its framework.

    Attributes:
        is_dp_inner: whether replicas have neighbouring ranks (Megatron) rather than stages (hpcpace, DeviceMesh).
        overlaps: whether replicas exchange gradients while the backward pass runs.
        is_hierarchical: whether collectives first add up on each node, so that nodes exchange what one rank has; None
            where the library chooses: then they are rings on a machine with `is_of_rings`, and elsewhere nodes are
            taken to send the geometric mean of both, which is nearest to either.
        gradient_bytes: of an element of gradients between replicas; 0 for that of activations.
        sync_every: steps after which replicas exchange; more than 1 is local SGD.
        is_synced_by_stage: whether a stage exchanges its gradients before it passes on those of its last microbatch, as
            torch's pipelines of DistributedDataParallel do, whose backward pass ends with the exchange.
    """

    model: Model
    machine: Machine
    is_dp_inner: bool = False
    overlaps: bool = True
    is_hierarchical: bool | None = None
    gradient_bytes: int = 0
    sync_every: int = 1
    is_synced_by_stage: bool = False

    def on(self, machine: Machine) -> Job:
        """Return this job on another machine."""
        return replace(self, machine=machine)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where the groups of ranks lie on nodes, int64, (num_layouts,) each.

    Attributes:
        size: ranks of a group.
        local: of them on one node.
        num_beside: groups that share the node's network.
        distance: nodes from a member to the next one on another node.
        crossing: neighbouring nodes that send to others so far away at once.
    """

    size: Ints
    local: Ints
    num_beside: Ints
    distance: Ints
    crossing: Ints

    @property
    def num_nodes(self) -> Ints:
        """Nodes of a group."""
        return ceil(self.size, self.local)


class Engine(ABC):
    """The steps of layouts of a job; each attribute is float64, (num_layouts,), unless it says otherwise."""

    def __init__(self, job: Job, layouts: Layouts) -> None:
        self.job, self.layouts, self.machine = job, layouts, job.machine

    @property
    @abstractmethod
    def compute_s(self) -> Floats:
        """What the rank with most computes in a step, waits and exchanges left out."""

    @property
    @abstractmethod
    def passes_s(self) -> Floats:
        """From the first forward pass to the last backward pass, without what replicas exchange."""

    @property
    @abstractmethod
    def last_backward_s(self) -> Floats:
        """The backward pass of the last microbatch, under which replicas can exchange gradients."""

    @property
    @abstractmethod
    def exchanged_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of the gradients and of the parameters of the rank with most."""

    @property
    @abstractmethod
    def tensor_s(self) -> Floats:
        """Exchanges of tensor parallelism of a step, which `passes_s` has."""

    @property
    @abstractmethod
    def update_s(self) -> Floats:
        """The optimizer."""

    @property
    @abstractmethod
    def memory_bytes(self) -> Floats:
        """Memory of the rank with most, as far as it is known."""

    @property
    @abstractmethod
    def inner_network_bytes(self) -> Floats:
        """Bytes that the busiest node sends to others in a step within replicas."""

    @cached_property
    def replica_groups(self) -> Groups:
        """Groups of data parallelism."""
        layouts = self.layouts
        return self.groups(layouts.dp, layouts.tp * (1 if self.job.is_dp_inner else layouts.pp))

    @cached_property
    def _replica_groups_in_turn(self) -> Groups:
        """Groups of data parallelism beside which those of other stages are silent."""
        layouts, groups = self.layouts, self.replica_groups
        stages = np.clip(np.minimum(self.machine.gpus_per_node, layouts.num_ranks) // layouts.tp, 1, layouts.pp)
        return replace(
            groups,
            num_beside=np.maximum(groups.num_beside // stages, 1),
            crossing=np.maximum(layouts.tp // self.machine.gpus_per_node, 1),
        )

    @cached_property
    def _gradients_s(self) -> Floats:
        """Exchange of gradients of a stage between replicas, overlapped or not: all-reduce, or half of it with ZeRO."""
        # Parameters of local SGD are averaged between steps, by all stages at once.
        is_in_turn = self.job.is_synced_by_stage and self.job.sync_every == 1
        groups = self._replica_groups_in_turn if is_in_turn else self.replica_groups
        whole_s, half_s = (self.ring_s(groups, self.exchanged_bytes[0], rounds) for rounds in (2, 1))
        return np.where(self.layouts.zero > 0, half_s, whole_s)

    @cached_property
    def _gathers_s(self) -> Floats:
        """Gathering of parameters that replicas share out."""
        return self._num_gathers * self.ring_s(self.replica_groups, self.exchanged_bytes[1], 1)

    @cached_property
    def _num_gathers(self) -> Ints:
        """How often parameters are gathered: once after the update, or for each pass of each microbatch (ZeRO 3)."""
        return np.choose(self.layouts.zero, [np.zeros_like(self.layouts.zero), 1, 1, 2 * self.layouts.num_micro])

    @cached_property
    def replica_s(self) -> Floats:
        """Exchange between replicas, overlapped or not."""
        return self._gradients_s + self._gathers_s

    @cached_property
    def exposed_replica_s(self) -> Floats:
        """Exchange between replicas that computation does not hide."""
        if self.job.sync_every > 1:
            return self.replica_s / self.job.sync_every
        in_turn = self.layouts.pp if self.job.is_synced_by_stage else 1
        if not self.job.overlaps:
            return in_turn * self._gradients_s + self._gathers_s
        all_bytes = np.maximum(self.exchanged_bytes[0], 1.0)
        later_bytes = np.where(all_bytes > _FIRST_BUCKET_BYTES, all_bytes - _FIRST_BUCKET_BYTES, all_bytes)
        last_s = np.minimum(later_bytes, _BUCKET_BYTES) / all_bytes * self._gradients_s
        gradients_s = last_s + np.maximum(self._gradients_s - last_s - self.last_backward_s, 0.0)
        # Parameters that the optimizer has changed are gathered after it; ZeRO 3 gathers them ahead of each pass.
        ahead_s = np.maximum(self._gathers_s - self.passes_s, self._gathers_s / np.maximum(self._num_gathers, 1))
        return in_turn * gradients_s + np.where(self.layouts.zero == 3, ahead_s, self._gathers_s)

    @cached_property
    def step_s(self) -> Floats:
        """A step."""
        return self.passes_s + self.exposed_replica_s + self.update_s

    @property
    def parts_s(self) -> dict[str, Floats]:
        """Parts of a step: what the rank with most computes, and what it waits for."""
        return {
            "compute": self.compute_s,
            "pipeline": self.passes_s - self.compute_s - self.tensor_s,
            "tensor": self.tensor_s,
            "gradients": self.exposed_replica_s,
            "update": self.update_s,
        }

    @cached_property
    def network_bytes(self) -> Floats:
        """Bytes that the busiest node sends to others in a step, headers left out."""
        gradients, parameters = (self.sent_bytes(self.replica_groups, size, 1) for size in self.exchanged_bytes)
        sent = np.where(self.layouts.zero > 0, 1, 2) * gradients + self._num_gathers * parameters
        return sent / self.job.sync_every + self.inner_network_bytes

    def groups(self, size: Ints, stride: Ints) -> Groups:
        """Return where groups lie whose ranks are a stride apart: nodes take `gpus_per_node` ranks in turn."""
        on_node = np.minimum(self.machine.gpus_per_node, self.layouts.num_ranks)
        local = np.clip(on_node // stride, 1, size)
        distance = np.maximum(stride // self.machine.gpus_per_node, 1)
        beside = np.maximum(on_node // local, 1)
        return Groups(size=size, local=local, num_beside=beside, distance=distance, crossing=distance)

    def sent_bytes(self, groups: Groups, size_bytes: Floats, num_rounds: int) -> Floats:
        """Return what a node sends to others for all its groups, 0 where a group stays on its node.

        A ring of n ranks passes (n - 1) / n of a message over each of its edges in a round, and one of them leaves a
        node; first added up on m nodes, (m - 1) / m.

        Args:
            groups: that exchange.
            size_bytes: of the message.
            num_rounds: 2 of an all-reduce, 1 of a reduce-scatter or an all-gather.
        """
        ring, first = ((num - 1) / num for num in (groups.size, groups.num_nodes))
        is_ring = self.machine.is_of_rings if self.job.is_hierarchical is None else not self.job.is_hierarchical
        part = ring if is_ring else np.sqrt(ring * first) if self.job.is_hierarchical is None else first
        sent = num_rounds * part * size_bytes * groups.num_beside
        return np.where(groups.local < groups.size, sent, 0.0)

    def ring_s(self, groups: Groups, size_bytes: Floats, num_rounds: int) -> Floats:
        """Return how long a collective takes; arguments as of `sent_bytes`."""
        machine = self.machine
        latency_s = num_rounds * (groups.num_nodes - 1) * machine.network_latency_s
        is_in_leaf = (groups.num_nodes - 1) * groups.distance < machine.leaf_nodes
        # Libraries let all ranks of a node that are in a ring send a part of it to the next node.
        rate = self._node_rate(groups.num_beside * groups.local, groups.crossing, is_in_leaf)
        network_s = self.sent_bytes(groups, size_bytes, num_rounds) / rate + latency_s
        # Between ranks of a node: the whole ring, or the part of it that is on the node.
        sent = num_rounds * (groups.size - 1) / groups.size * size_bytes
        node_s = sent / machine.node_rate + num_rounds * groups.local * machine.node_latency_s
        return np.maximum(network_s, np.where(groups.local > 1, node_s, 0.0))

    def _node_rate(self, num_senders: Ints, crossing: Ints, is_in_leaf: Bools) -> Floats:
        """Return the bytes a second that a node sends, float64.

        Args:
            num_senders: ranks of a node that send to other nodes at once.
            crossing: neighbouring nodes whose data go over the uplinks of a leaf, if these have all of them: as many
                as the data have nodes to go, if all send at once.
            is_in_leaf: whether they stay below one leaf.
        """
        machine = self.machine
        adapters = np.minimum(num_senders, machine.num_nics) / machine.num_nics
        part = np.minimum(crossing, machine.leaf_nodes) / machine.leaf_nodes
        slower = np.where(is_in_leaf, 1.0, np.maximum(machine.oversubscription * part, 1.0))
        return np.asarray(machine.network_rate * adapters / slower)

    def message_s(self, size_bytes: Floats, leaves: Bools, num_beside: Ints, distance: Ints) -> Floats:
        """Return how long messages over a distance in nodes take, `num_beside` of them at once where they leave one."""
        machine = self.machine
        is_in_leaf = ceil(self.layouts.num_ranks, machine.gpus_per_node).max(initial=1) <= machine.leaf_nodes
        rate = self._node_rate(num_beside, distance, np.asarray(is_in_leaf))
        network_s = size_bytes * num_beside / rate + machine.network_latency_s
        return np.where(leaves, network_s, size_bytes / machine.node_rate + machine.node_latency_s)


def ceil(number: Ints | int, by: Ints | int) -> Ints:
    """Return quotients, rounded up."""
    return np.asarray(-(-number // by))
