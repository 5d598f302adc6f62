"""The memory of a rank's tensors: parameters, gradients, state of the optimizer, and what backward needs.

A process also has Python, torch and caches of allocators, which say little about a model. Activations are the tensors
that autograd saves for the backward pass: the most bytes of them at a time, each storage once, parameters left out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(kw_only=True)
class TensorMemory:
    """Bytes of the tensors of a rank, by what they are for."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0

    def facts(self) -> dict[str, int]:
        """Return what a run records of it."""
        return asdict(self)


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of some tensors' storages, each once; of a DTensor, of this rank's part."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = _storage(tensor)
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of what an optimizer keeps on this rank from step to step."""
    local = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has the one of its own share
    return tensor_bytes(
        value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)
    )


class _Saved:
    """A tensor that autograd has saved; its end is that of the graph, or of its use in backward."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ActivationMeter:
    """Measures what autograd saves for backward.

    Attributes:
        peak_bytes: the most at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = {_storage(parameter).data_ptr() for parameter in parameters}
        self._uses: Counter[int] = Counter()
        self._live_bytes = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the forward and backward passes inside, of this thread."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        saved, storage = _Saved(tensor), _storage(tensor)
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._parameters:
            if not self._uses[address]:
                self._live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self._uses[address] += 1
            weakref.finalize(saved, self._drop, address, size).atexit = False
        return saved

    def _drop(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._live_bytes -= size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
