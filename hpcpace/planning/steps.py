"""The steps of the models that can be planned: a transformer in any layout, and a traced model that is replicated.

Work of a layer is its operations at the rate that matrix products reach, what elementwise operations move, and a time
that does not shrink. The stages of a pipeline form a graph: one forward, one backward (1F1B; Narayanan et al. 2019,
PipeDream-Flush). A stage runs as many forward passes ahead as there are stages behind it, and then takes turns. Each
pass waits for the stage's last one and for its data. After as many microbatches as it takes to fill the pipeline, each
further one costs what the slowest stage works for it, so only those are walked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from hpcpace.core.errors import ConfigError
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.planning.engine import Engine, Groups, Job, ceil
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.model import MeasuredModel, Transformer

_PASSES = 3  # format: an activation that is kept was written once, and read here and by the next operation
_STATE_BYTES = 12  # format: 32-bit master parameter and two moments of Adam
_UPDATE_BYTES = 36  # format: moved for each parameter by a step of Adam: 20 read, 16 written


def steps_of(job: Job, layouts: Layouts) -> Engine:
    """Return the steps of layouts of a job.

    Raises:
        ConfigError: the layouts cut a model that can only be replicated.
    """
    if isinstance(job.model, Transformer):
        return TransformerSteps(job, layouts, job.model)
    return ReplicaSteps(job, layouts, job.model)


class TransformerSteps(Engine):
    """The steps of a transformer."""

    def __init__(self, job: Job, layouts: Layouts, model: Transformer) -> None:
        super().__init__(job, layouts)
        self.model = model

    @cached_property
    def activation_bytes(self) -> tuple[Floats, Floats]:
        """Bytes that a layer keeps of a microbatch on a rank: outside the core of attention, and of it.

        Korthikanti et al. 2023, equations 1 and 4: s b h (10 + 24 / t + 5 a s / (h t)), in elements of 2 bytes;
        fused attention has none of the last.
        """
        layouts, model = self.layouts, self.model
        scale = layouts.micro_batch * layouts.element_bytes / 2.0 * model.sequence
        split = 24 * model.width_of_mlp / (4 * model.hidden)
        outside = scale * model.hidden * (10 / self._split + split / layouts.tp)
        scores = 0 if model.is_attention_fused else 5 * model.num_heads * model.sequence
        core = scale * scores / layouts.tp
        return np.asarray(outside), np.asarray(core)

    @cached_property
    def _split(self) -> Ints:
        """Ranks over which what lies between matrix products is split."""
        return np.where(self.layouts.is_sequence_split > 0, self.layouts.tp, 1)

    def _work_s(self, flops: Floats, moved: Floats) -> Floats:
        # Elements of 4 bytes take twice as long to multiply; what they move is in `moved` already.
        return flops * (self.layouts.element_bytes / 2) / self.machine.flops + moved / self.machine.memory_rate

    @cached_property
    def _core_s(self) -> Floats:
        """Core of attention of a layer, forward, for a microbatch."""
        share = self.layouts.micro_batch / self.layouts.tp
        return self._work_s(share * self.model.attention_flops, _PASSES * self.activation_bytes[1])

    @cached_property
    def _layer_s(self) -> Floats:
        """Work of a layer, forward, for a microbatch."""
        share = self.layouts.micro_batch / self.layouts.tp
        return self._core_s + self._work_s(share * self.model.matmul_flops, _PASSES * self.activation_bytes[0])

    @cached_property
    def _head_s(self) -> Floats:
        """Work of the head, forward, for a microbatch; logits have 4 bytes."""
        share = self.layouts.micro_batch / self.layouts.tp
        moved = _PASSES * 4.0 * share * self.model.sequence * self.model.vocabulary
        return self._work_s(share * self.model.head_flops, moved)

    @cached_property
    def _layer_work_s(self) -> tuple[Floats, Floats]:
        """Forward and backward pass of a layer for a microbatch, exchanges left out."""
        forward_s = self._layer_s + self.machine.layer_s
        again_s = np.choose(self.layouts.recompute, [np.zeros(len(self.layouts)), self._core_s, forward_s])
        return forward_s, 2 * self._layer_s + self.machine.layer_s + again_s

    @cached_property
    def _layer_tensor_s(self) -> tuple[Floats, Floats]:
        """Exchanges of both passes of a layer: two all-reduces each, or as many bytes in halves where split."""
        reduce_s = self.ring_s(self._tensor_groups, self._boundary_bytes, 2)
        return 2 * reduce_s, (self._num_reduces - 2) * reduce_s

    @cached_property
    def _num_reduces(self) -> Floats:
        """All-reduces of tensor parallelism for a layer and a microbatch.

        Full recomputation repeats those of the forward pass; with sequences split, the backward pass gathers once more
        what it did not keep (Korthikanti et al. 2023, section 4.2).
        """
        layouts = self.layouts
        return np.where(layouts.recompute == 2, 6, 4) + np.where(layouts.is_sequence_split > 0, 0.5, 0.0)

    @cached_property
    def _tensor_groups(self) -> Groups:
        return self.groups(self.layouts.tp, np.ones_like(self.layouts.tp))

    @cached_property
    def _boundary_bytes(self) -> Floats:
        """Bytes of a microbatch between two layers."""
        layouts, model = self.layouts, self.model
        return np.asarray(1.0 * layouts.micro_batch * model.sequence * model.hidden * layouts.element_bytes)

    @cached_property
    def _max_layers(self) -> Ints:
        return ceil(self.model.num_layers, self.layouts.pp)

    @cached_property
    def compute_s(self) -> Floats:
        """What the rank with most computes in a step: that of the last stage, or of the one with most layers."""
        return self._by_pp(lambda pp, which: self._stage_work_s(pp, which)[2])

    @cached_property
    def tensor_s(self) -> Floats:
        """Exchanges of tensor parallelism of a step."""
        forward_s, backward_s = self._layer_tensor_s
        return np.asarray((forward_s + backward_s) * self._max_layers * self.layouts.num_micro)

    @cached_property
    def last_backward_s(self) -> Floats:
        """The backward pass of the last microbatch."""
        head_s = np.where(self.layouts.pp == 1, 2 * self._head_s, 0.0)
        return self._max_layers * (self._layer_work_s[1] + self._layer_tensor_s[1]) + head_s

    @cached_property
    def passes_s(self) -> Floats:
        """From the first forward pass to the last backward pass, and the exchange of a tied embedding."""
        return self._by_pp(self._pipeline_s) + self._tied_s

    def _by_pp(self, made: Callable[[int, Bools], Floats]) -> Floats:
        """Return what is computed for each number of stages by itself."""
        found = np.empty(len(self.layouts))
        for pp in np.unique(self.layouts.pp).tolist():
            which = self.layouts.pp == pp
            found[which] = made(pp, which)
        return found

    def _stage_work_s(self, pp: int, which: Bools) -> tuple[Floats, Floats, Floats]:
        """Return work of the stages, forward and backward, (num_layouts, pp), and that of a step of the busiest."""
        each, left_over = divmod(self.model.num_layers, pp)
        layers = each + (np.arange(pp) < left_over)
        forward_s, backward_s = (one[which, None] * layers for one in self._layer_work_s)
        forward_s[:, -1] += self._head_s[which]
        backward_s[:, -1] += 2 * self._head_s[which]
        return forward_s, backward_s, self.layouts.num_micro[which] * (forward_s + backward_s).max(axis=1)

    def _pipeline_s(self, pp: int, which: Bools) -> Floats:
        each, left_over = divmod(self.model.num_layers, pp)
        layers = each + (np.arange(pp) < left_over)
        work_s = self._stage_work_s(pp, which)[:2]
        forward_s, backward_s = (
            work + tensor[which, None] * layers for work, tensor in zip(work_s, self._layer_tensor_s, strict=True)
        )
        interleave, num_micro = self.layouts.interleave[which], self.layouts.num_micro[which]
        transfer_s = self._transfers_s(pp, which) * interleave[:, None]
        whole_s = pipeline_s(forward_s, backward_s, transfer_s, num_micro)
        busy_s = num_micro * (forward_s + backward_s).max(axis=1)
        # More stages of a rank fill the pipeline as many times faster (Narayanan et al. 2021, section 2.2).
        return np.asarray(busy_s + (whole_s - busy_s) / interleave)

    @cached_property
    def _stage_stride(self) -> Ints:
        """Ranks from a stage to the next."""
        return self.layouts.tp * (self.layouts.dp if self.job.is_dp_inner else 1)

    @cached_property
    def _num_senders(self) -> Ints:
        """Ranks of a node that send to the next stage at once, where that is on another node."""
        return np.minimum(self._stage_stride, self.machine.gpus_per_node)

    def _transfers_s(self, pp: int, which: Bools) -> Floats:
        """Return how long a microbatch's activations take from each stage to the next, (num_layouts, pp - 1)."""
        stride, per_node = self._stage_stride[which, None], self.machine.gpus_per_node
        first = np.arange(pp - 1)[None, :] * stride
        leaves = first // per_node != (first + stride) // per_node
        size_bytes = (self._boundary_bytes / self._split)[which, None]
        distance = np.maximum(stride // per_node, 1)
        return self.message_s(size_bytes, leaves, self._num_senders[which, None], distance)

    @cached_property
    def _tied_bytes(self) -> Floats:
        """Gradients of a tied embedding, which the first and the last stage of a pipeline add up."""
        layouts, model = self.layouts, self.model
        size_bytes = model.embedding_parameters / layouts.tp * self._gradient_bytes
        return np.where((layouts.pp > 1) & model.is_tied, size_bytes, 0.0)

    @cached_property
    def _is_tied_over_nodes(self) -> Bools:
        return np.asarray((self.layouts.pp - 1) * self._stage_stride >= self.machine.gpus_per_node)

    @cached_property
    def _tied_s(self) -> Floats:
        distance = np.maximum((self.layouts.pp - 1) * self._stage_stride // self.machine.gpus_per_node, 1)
        took_s = self.message_s(self._tied_bytes, self._is_tied_over_nodes, self._num_senders, distance)
        return np.where(self._tied_bytes > 0, took_s, 0.0)

    @cached_property
    def _gradient_bytes(self) -> Ints:
        return np.where(self.job.gradient_bytes > 0, self.job.gradient_bytes, self.layouts.element_bytes)

    @cached_property
    def stage_parameters(self) -> Floats:
        """Parameters of the rank with most."""
        layouts, model = self.layouts, self.model
        heads = np.where((layouts.pp == 1) & (not model.is_tied), 2, 1)
        cut = self._max_layers * float(model.layer_parameters) + heads * model.embedding_parameters
        return np.asarray(cut / layouts.tp + (model.sequence + 2) * model.hidden)

    @cached_property
    def exchanged_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of the gradients and of the parameters of the rank with most."""
        return self.stage_parameters * self._gradient_bytes, self.stage_parameters * self.layouts.element_bytes

    @cached_property
    def update_s(self) -> Floats:
        """The optimizer, whose state ZeRO shares out."""
        shared = np.where(self.layouts.zero > 0, self.layouts.dp, 1)
        return self.stage_parameters / shared * _UPDATE_BYTES / self.machine.memory_rate

    @cached_property
    def inner_network_bytes(self) -> Floats:
        """Bytes that the busiest node sends for tensor and pipeline parallelism."""
        layouts = self.layouts
        reduced = self.sent_bytes(self._tensor_groups, self._boundary_bytes, 2)
        tensors = reduced * self._num_reduces * self._max_layers * layouts.num_micro
        passed = self._boundary_bytes / self._split * self._num_senders * layouts.num_micro * layouts.interleave
        leaves = self._is_tied_over_nodes & (layouts.pp > 1)
        # A node in the middle sends activations on and gradients back; those at the ends exchange a tied embedding.
        in_middle = np.where(layouts.pp * self._stage_stride > 2 * self.machine.gpus_per_node, 2 * passed, 0.0)
        at_ends = passed + self._tied_bytes * self._num_senders
        return tensors + np.where(leaves, np.maximum(in_middle, at_ends), 0.0)

    @cached_property
    def state_bytes(self) -> Floats:
        """Parameters, gradients and state of Adam of the rank with most (Rajbhandari et al. 2020, section 3)."""
        layouts, element = self.layouts, self.layouts.element_bytes
        shared = [np.where(layouts.zero >= stage, layouts.dp, 1) for stage in (1, 2, 3)]
        # A parameter of 4 bytes is its own master.
        adam = np.where(element == 4, _STATE_BYTES - 4, _STATE_BYTES)
        return self.stage_parameters * (adam / shared[0] + self._gradient_bytes / shared[1] + element / shared[2])

    @cached_property
    def activations_in_flight_bytes(self) -> Floats:
        """Activations of the rank with most: the first stage keeps those of as many microbatches as there are stages.

        Korthikanti et al. 2023, section 4.2.3, interleaved stages included.
        """
        layouts, model = self.layouts, self.model
        outside, core = self.activation_bytes
        of_layer = np.choose(layouts.recompute, [outside + core, outside, self._boundary_bytes / self._split])
        deeper = np.where(layouts.interleave > 1, 1 + (layouts.pp - 1) / (layouts.pp * layouts.interleave), 1.0)
        first = of_layer * self._max_layers * np.minimum(layouts.pp, layouts.num_micro) * deeper
        # One layer at a time has all of its activations again.
        again = np.choose(layouts.recompute, [np.zeros(len(layouts)), core, outside + core])
        logits = 4.0 * layouts.micro_batch * model.sequence * model.vocabulary / layouts.tp
        # The last stage keeps one microbatch, and its logits.
        last = of_layer * self._max_layers + logits
        return np.asarray(np.maximum(first, last) + again)

    @cached_property
    def memory_bytes(self) -> Floats:
        """State and activations of the rank with most; ZeRO 3 gathers a layer ahead of the one that computes."""
        gathered = 2 * self.model.layer_parameters + self.model.embedding_parameters
        gathered_bytes = np.where(self.layouts.zero == 3, gathered * self.layouts.element_bytes / self.layouts.tp, 0.0)
        return self.state_bytes + gathered_bytes + self.activations_in_flight_bytes


class ReplicaSteps(Engine):
    """The steps of a traced model on other numbers of replicas."""

    def __init__(self, job: Job, layouts: Layouts, model: MeasuredModel) -> None:
        """Take the layouts.

        Raises:
            ConfigError: one cuts the model.
        """
        super().__init__(job, layouts)
        if (layouts.pp * layouts.tp > 1).any():
            raise ConfigError(f"{model.name} can only be replicated: name a transformer with --model to cut it")
        self.model = model

    @cached_property
    def compute_s(self) -> Floats:
        """Both passes of all microbatches."""
        samples = self.layouts.micro_batch * self.layouts.num_micro
        return np.asarray(samples * (self.model.forward_s + self.model.backward_s))

    @property
    def passes_s(self) -> Floats:
        """As `compute_s`: nothing is exchanged within a replica."""
        return self.compute_s

    @cached_property
    def last_backward_s(self) -> Floats:
        """The backward pass of the last microbatch."""
        return np.asarray(self.layouts.micro_batch * self.model.backward_s)

    @cached_property
    def exchanged_bytes(self) -> tuple[Floats, Floats]:
        """What replicas were seen to exchange; parameters as many bytes as gradients."""
        size_bytes = np.full(len(self.layouts), self.model.gradient_bytes)
        return size_bytes, size_bytes

    @cached_property
    def tensor_s(self) -> Floats:
        """None."""
        return np.zeros(len(self.layouts))

    @cached_property
    def update_s(self) -> Floats:
        """The optimizer, whose state ZeRO shares out."""
        return self.model.update_s / np.where(self.layouts.zero > 0, self.layouts.dp, 1)

    @cached_property
    def memory_bytes(self) -> Floats:
        """Not known, so that no layout is left out."""
        return np.zeros(len(self.layouts))

    @cached_property
    def inner_network_bytes(self) -> Floats:
        """None."""
        return np.zeros(len(self.layouts))


_WALKED = 3
"""Microbatches that are walked, for each stage: two fill a pipeline, the third shows what each further one costs."""

_MAX_STAGES = 128
"""speed: of a pipeline that is walked, which takes a second; deeper ones are filled as if their stages were equal."""


def pipeline_s(forward_s: Floats, backward_s: Floats, transfer_s: Floats, num_micro: Ints) -> Floats:
    """Return how long pipelines of equally many stages take, float64, (num_layouts,).

    Args:
        forward_s, backward_s: of one microbatch on each stage, float64, (num_layouts, num_stages).
        transfer_s: of a microbatch's activations from each stage to the next, and of their gradients back, float64,
            (num_layouts, num_stages - 1); the stage that receives is busy with it.
        num_micro: microbatches, int64, (num_layouts,).
    """
    num_layouts, num_stages = forward_s.shape
    if num_stages == 1:
        return np.asarray(num_micro * (forward_s + backward_s)[:, 0])
    received_s = np.pad(transfer_s, ((0, 0), (1, 0))) + np.pad(transfer_s, ((0, 0), (0, 1)))
    slowest_s = (forward_s + backward_s + received_s).max(axis=1)
    if num_stages > _MAX_STAGES:
        return np.asarray((forward_s + backward_s + received_s).sum(axis=1) + (num_micro - 1) * slowest_s)
    found = np.empty(num_layouts)
    walked = np.minimum(num_micro, _WALKED * num_stages)
    for count in np.unique(walked):
        which = walked == count
        ends_s = walk_s(forward_s[which], backward_s[which], transfer_s[which], int(count))
        found[which] = ends_s + (num_micro[which] - count) * slowest_s[which]
    return found


def walk_s(forward_s: Floats, backward_s: Floats, transfer_s: Floats, num_micro: int) -> Floats:
    """Return when the last pass ends, pass by pass, float64, (num_layouts,); arguments as of `pipeline_s`."""
    num_layouts, num_stages = forward_s.shape
    free = np.zeros((num_stages, num_layouts))
    ends = np.zeros((2, num_stages, num_micro, num_layouts))  # of forward passes, then of backward ones
    orders = [_order(num_stages - 1 - stage, num_micro) for stage in range(num_stages)]
    done = np.zeros((2, num_stages), np.int64)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                is_backward, micro = order[-1]
                source = stage + 1 if is_backward else stage - 1
                has_source = 0 <= source < num_stages
                if has_source and done[is_backward, source] <= micro:
                    break
                start = free[stage]
                if has_source:
                    start = np.maximum(start, ends[is_backward, source, micro]) + transfer_s[:, min(source, stage)]
                work_s = (backward_s if is_backward else forward_s)[:, stage]
                ends[is_backward, stage, micro] = free[stage] = start + work_s
                done[is_backward, stage] += 1
                order.pop()
    return np.asarray(free.max(axis=0))


def _order(num_ahead: int, num_micro: int) -> list[tuple[int, int]]:
    """Return the passes of a stage, last first: whether backward, and of which microbatch."""
    ahead = min(num_ahead, num_micro)
    turns = [turn for micro in range(num_micro - ahead) for turn in ((0, micro + ahead), (1, micro))]
    return [
        *((0, micro) for micro in range(ahead)),
        *turns,
        *((1, micro) for micro in range(num_micro - ahead, num_micro)),
    ][::-1]
