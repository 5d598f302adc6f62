"""How replicas stay one model: DDP and its compression, fully_shard, local SGD, DiLoCo, ZeRO's optimizer.

torch's own 8-bit hooks fail on gloo, have one scale for a whole bucket, or loop over blocks in Python, and they gather
all gradients on each rank, which is more than an all-reduce of float32 from 8 replicas on. The one here follows ZeRO++
(Wang et al. 2023, section 3.3): each replica averages one share and hands it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hpcpace.core.errors import WorldError
from hpcpace.train.plan import INT8_BLOCK as BLOCK
from hpcpace.train.plan import POWERSGD_RANK, POWERSGD_START, SCALE_BYTES
from hpcpace.train.settings import TrainConfig

_LARGEST = 127
OUTER_MOMENTUM = 0.9
"""That of the paper."""


def int8_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the replicas, with all that is sent in 8 bits and a scale for each block.

    An all-to-all brings each replica the same share of all buckets; an all-gather brings all the averaged shares.
    """
    gradients, num_ranks = bucket.buffer(), group.size()
    shares = quantize(_padded(gradients, num_ranks).view(num_ranks, -1))
    received = torch.empty_like(shares)
    arrived = dist.all_to_all_single(received, shares, group=group, async_op=True).get_future()

    def hand_on(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        share = quantize(dequantize(received).mean(0, keepdim=True))
        gathered = torch.empty_like(shares)
        dist.all_gather(list(gathered.split(1)), share, group=group, async_op=True).get_future().wait()
        return gradients.copy_(dequantize(gathered).flatten()[: gradients.numel()])

    average: torch.futures.Future[Tensor] = arrived.then(hand_on)
    return average


class HostGroups(NamedTuple):
    """The groups of a hierarchical average.

    Attributes:
        local: the replicas of this host.
        across: the replicas of all hosts that have the same place among those of their host.
    """

    local: dist.ProcessGroup
    across: dist.ProcessGroup


def hierarchical_hook(groups: HostGroups, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the replicas: each replica of a host gets a share, averages it over hosts, and hands it on.

    Between hosts goes as much as if each of them had one replica (Jia et al. 2018, section 3.2). It is over when this
    returns, so that all ranks go through the steps of all buckets in the same order.
    """
    gradients, num_local = bucket.buffer(), groups.local.size()
    gradients.div_(num_local * groups.across.size())
    whole = functional.pad(gradients, (0, -gradients.numel() % num_local))
    share = torch.empty_like(whole[: whole.numel() // num_local])
    dist.reduce_scatter_tensor(share, whole, group=groups.local)
    dist.all_reduce(share, group=groups.across)
    dist.all_gather_into_tensor(whole, share, group=groups.local)
    gradients.copy_(whole[: gradients.numel()])
    devices: list[Any] = [gradients.device] if gradients.device.type == "cuda" else []
    average: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    average.set_result(gradients)
    return average


def host_groups(replicas: Iterable[Sequence[int]], hosts: Sequence[str]) -> HostGroups | None:
    """Return the groups of this rank for a hierarchical average; None where that is the plain one.

    It is where the replicas of a model are on one host, or each on its own.

    Collective: every rank of the default process group calls this with the same arguments.

    Args:
        replicas: the ranks that hold the same part of the model, group by group.
        hosts: the host of each rank.

    Raises:
        WorldError: hosts have different numbers of the replicas.
    """
    rank, found = dist.get_rank(), None
    for members in replicas:
        by_host: dict[str, list[int]] = {}
        for member in members:
            by_host.setdefault(hosts[member], []).append(member)
        if len(by_host) == 1 or len(by_host) == len(members):
            continue
        if len({len(local) for local in by_host.values()}) > 1:
            counts = ", ".join(f"{len(local)} on {host}" for host, local in by_host.items())
            raise WorldError(
                f"--hierarchical needs as many replicas on each host, not {counts}: drop it, or place them"
            )
        own: dict[str, dist.ProcessGroup] = {}
        for kind, groups in (("local", by_host.values()), ("across", zip(*by_host.values(), strict=True))):
            for ranks in groups:
                group = dist.new_group(list(ranks), group_desc=f"replicas_{kind}")
                if rank in ranks:
                    own[kind] = group
        if own:
            found = HostGroups(**own)
    return found


def quantize(values: Tensor) -> Tensor:
    """Round values to 8 bits.

    Args:
        values: (rows, columns), of any floating type; columns are a multiple of INT8_BLOCK.

    Returns:
        int8, (rows, columns + 4 columns / INT8_BLOCK): the integers of a row, then the bytes of its float32 scales. A
        value is its integer times the scale of its block, the largest absolute value of which is 127.
    """
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True) / _LARGEST
    # A block of zeros has a scale of 0.
    integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([integers.flatten(1), scales.flatten(1).view(torch.int8)], dim=1)


def dequantize(message: Tensor) -> Tensor:
    """Return the values of `quantize` again: float32, (rows, columns)."""
    num_blocks = message.shape[1] // (BLOCK + SCALE_BYTES)
    integers, scales = message.split([num_blocks * BLOCK, num_blocks * SCALE_BYTES], dim=1)
    scales = scales.contiguous().view(torch.float32)
    values: Tensor = integers.unflatten(1, (-1, BLOCK)).float() * scales.unsqueeze(2)
    return values.flatten(1)


def _padded(values: Tensor, num_ranks: int) -> Tensor:
    return functional.pad(values, (0, -values.numel() % (num_ranks * BLOCK)))


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, zero_group: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Return AdamW with the settings of GPT-3 (Brown et al. 2020, appendix B), without decay of biases and norms.

    Collective where there is a `zero_group`: every member calls this.

    Args:
        parameters: those of this rank.
        learning_rate: the step size.
        zero_group: replicas that share the optimizer's state out (Rajbhandari et al. 2020, stage 1): each keeps the
            state of some parameters, steps those, and broadcasts them.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if zero_group is None:
        # Fused is the fastest on CPUs, too: 1.0 ms a step against 2.2 ms of foreach with preset tiny and 1 thread.
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    # torch warns of its own torch.jit.script when this is imported.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=torch.optim.AdamW,
        process_group=zero_group,
        # One broadcast from each replica, not one for each parameter.
        parameters_as_bucket_view=True,
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


_MIB = 1024 * 1024


def replicate(
    module: nn.Module, *, group: dist.ProcessGroup, settings: TrainConfig, hosts: HostGroups | None = None
) -> nn.Module:
    """Wrap a module in DDP, which averages gradients over the replicas as the settings say.

    Collective: every member of `group` calls this.

    Args:
        module: a stage of the model.
        group: the replicas.
        settings: those of the training.
        hosts: the groups of a hierarchical average, where it is one.
    """
    limit: dict[str, Any] = {}
    if settings.bucket_mb is not None:
        limit = {"bucket_cap_mb": settings.bucket_mb}
    elif settings.has_one_bucket:
        # A bucket that is never full is sent when backward has ended.
        limit = {"bucket_cap_mb": 1 + sum(p.numel() * p.element_size() for p in module.parameters()) / _MIB}
    replica = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True, **limit)
    state, hook = _communication(settings.compress, group)
    if hosts is not None:
        state, hook = hosts, lambda groups, bucket: hierarchical_hook(groups, bucket)
    if hook is not None:
        replica.register_comm_hook(state, hook)
    return replica


def shard(
    module: nn.Module,
    pieces: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    is_pipelined: bool,
    policy: MixedPrecisionPolicy,
) -> None:
    """Share out parameters, gradients and optimizer state over the replicas (Rajbhandari et al. 2020, stage 3).

    Each piece is brought together when it is needed and let go afterwards. The module keeps what is in no piece, and
    pieces with a parameter that stands elsewhere, too. In a pipeline parameters stay until the last microbatch's
    backward pass, so that they travel once a step.
    """
    holders = Counter(parameter for part in module.modules() for parameter in part._parameters.values())
    for piece in pieces:
        if any(holders[parameter] > 1 for parameter in piece.parameters()):
            continue
        fully_shard(piece, mesh=mesh, reshard_after_forward=not is_pipelined, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def average_replicas(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Set each parameter to its mean over the replicas: the end of a round of local SGD (Stich 2019, algorithm 1).

    The state of the optimizer stays each replica's own.

    Collective: every member of `group` calls this.
    """
    average_parameters(iter(parameters), group)


class OuterOptimizer:
    """The outer step of DiLoCo (Douillard et al. 2023, algorithm 1): SGD with Nesterov's momentum, once a round.

    Its gradient is the change of the parameters during the round, averaged over the replicas, with the opposite sign.

    Args:
        parameters: on all replicas the same.
        learning_rate: of the outer step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> None:
        self._parameters = list(parameters)
        self._learning_rate = learning_rate
        self._anchors = [parameter.detach().clone() for parameter in self._parameters]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]

    @torch.no_grad()
    def step(self) -> None:
        """Step from the parameters before the round by their change; the parameters are the replicas' mean now."""
        for parameter, anchor, momentum in zip(self._parameters, self._anchors, self._momenta, strict=True):
            gradient = anchor - parameter
            momentum.mul_(OUTER_MOMENTUM).add_(gradient)
            anchor.sub_(gradient.add_(momentum, alpha=OUTER_MOMENTUM), alpha=self._learning_rate)
            parameter.copy_(anchor)

    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the tensors that it keeps of each parameter."""
        kept = zip(self._parameters, self._anchors, self._momenta, strict=True)
        return {parameter: {"outer": anchor, "outer_momentum": momentum} for parameter, anchor, momentum in kept}


def _communication(compress: str, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """Return state and hook of a DDP communication hook, torch's own but for int8; None for the plain all-reduce."""
    if compress == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
        )
        return state, powerSGD_hook.powerSGD_hook
    # DDP refuses annotations that are strings, and bf16_compress_hook by its name where there is no NCCL; gloo adds
    # bfloat16 up as well.
    hooks: dict[str, Any] = {
        "none": None,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
        "int8": lambda group, bucket: int8_hook(group, bucket),
    }
    return group, hooks[compress]
