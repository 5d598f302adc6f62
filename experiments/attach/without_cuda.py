"""Lets scripts that insist on GPUs run on CPUs: their edits import it before they ask for one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_join, _wrap = dist.init_process_group, DistributedDataParallel.__init__


def _same() -> Callable[..., Any]:
    return lambda tensors, *_, **__: tensors


def _nothing() -> Callable[..., int]:
    return lambda *_, **__: 0


def _over_gloo(backend: str = "gloo", *args: Any, **options: Any) -> None:
    _join("gloo", *args, **options)


def _on_cpus(model: Any, module: Any, *_: Any, device_ids: Any = None, **options: Any) -> None:
    _wrap(model, module, **options)


# Dynamo knows functions by identity: each has one of its own.
torch.Tensor.cuda, torch.nn.Module.cuda = _same(), _same()
torch.cuda.device_count = lambda: int(os.environ["ATTACH_RANKS"])
for name in ("set_device", "synchronize", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
    setattr(torch.cuda, name, _nothing())
dist.init_process_group = _over_gloo
DistributedDataParallel.__init__ = _on_cpus
