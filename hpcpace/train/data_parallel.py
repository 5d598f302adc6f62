"""How the replicas of a model stay one model: DDP with its buckets and compression, fully_shard, or local SGD."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcpace.config import TrainConfig
from hpcpace.train.compression import POWERSGD_RANK, POWERSGD_START
from hpcpace.train.quantize import int8_hook

_MIB = 1024 * 1024


def replicate(module: nn.Module, *, group: dist.ProcessGroup, settings: TrainConfig) -> nn.Module:
    """Wrap a module in DDP, which averages gradients over the replicas as the settings say.

    Collective: every member of `group` calls this.
    """
    limit: dict[str, Any] = {}
    if settings.bucket_mb is not None:
        limit = {"bucket_cap_mb": settings.bucket_mb}
    elif settings.has_one_bucket:
        # A bucket that is never full is sent when backward has ended.
        limit = {"bucket_cap_mb": 1 + sum(p.numel() * p.element_size() for p in module.parameters()) / _MIB}
    replica = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True, **limit)
    state, hook = _communication(settings.compress, group)
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
