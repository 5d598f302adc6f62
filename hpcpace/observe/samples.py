"""What a silent job shows of its steps: how many samples, and whether parameters changed.

Samples are a guess: the first dimension of the batches. Batches of a DataLoader count where they are used, in the step
in which a module gets as many: loaders may fetch ahead. Those of an evaluation do not count. In jobs without a
DataLoader, the first input of the module counts, once for each backward pass. Where several ranks share a batch, as in
tensor and pipeline parallelism, nothing is guessed: credited on each of them, it would count several times.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_SAMPLED = 64
_MAX_MODULES = 64
# More batches than a step has loaders or microbatches.
_MAX_FETCHED = 1_024
_PART_OF_DTENSOR = "_local_tensor"


class ParameterProbe:
    """Looks at the last parameter of the module that ran last, of those that have one; else it knows nothing."""

    def __init__(self) -> None:
        self._parameter: Any = None
        self._seen: Any = None
        self._last_of: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def forward_begins(self, module: torch.nn.Module) -> None:
        """Note the module that will be trained."""
        known = self._known(id(module))
        if known is not None:
            self._parameter = known
            return
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                # What torch.func puts in its place lasts for one call.
                if parameter.requires_grad and isinstance(parameter, torch.nn.Parameter):
                    self._parameter = parameter
                    self._last_of[id(module)] = (weakref.ref(owner), name)
        if len(self._last_of) > _MAX_MODULES:
            self._last_of.clear()

    def _known(self, key: int) -> Any:
        """Return what was found before: to walk through a large model takes milliseconds."""
        found = self._last_of.get(key)
        parameter = None if found is None else getattr(found[0](), found[1], None)
        return parameter if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad else None

    def backward_ended(self) -> None:
        """Note parameters and gradients."""
        self._seen = self._state()

    def has_changed(self) -> bool | None:
        """Return whether they are others now; None if that cannot be known."""
        state = self._state()
        return None if state is None else bool(state != self._seen)

    def _state(self) -> Any:
        parameter = self._parameter
        if parameter is None:
            return None
        gradient = parameter.grad
        try:
            state = [parameter._version, id(gradient)]
            if gradient is not None:
                state.append(gradient._version)
            with torch.no_grad():
                state += [tensor.detach().flatten()[-_SAMPLED:].sum().item() for tensor in _own((parameter, gradient))]
        except RuntimeError:  # tensors of inference mode have no version, and fake ones no values
            return None
        return state


def _own(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """Yield what this rank can read by itself of tensors: through `.data` they change without a new version.

    The values of a DTensor are spread over ranks, which would all have to read them; its own part is here. On a device,
    reading would wait for it.
    """
    for tensor in tensors:
        part: Any = getattr(tensor, _PART_OF_DTENSOR, tensor)
        if type(part) in (torch.Tensor, torch.nn.Parameter) and part.device.type == "cpu":
            yield part


_DEPTH = 3
_MAX_EVALUATED = 1024
"""memory: batches that a step may see without gradients before it trains on them; an evaluation has any number."""
_PIPELINES = ("torch.distributed.pipelining", "deepspeed.runtime.pipe", "colossalai.pipeline")
"""Packages whose engines hand parts of one batch through several ranks: the first stage loads it, or the last too."""


class BatchSizes:
    """Counts the samples of the step that is running.

    Attributes:
        source: what is counted, in words; empty as long as nothing is.
    """

    def __init__(self) -> None:
        self.source = ""
        self._has_loader = False
        self._fetched: list[_Fetched] = []
        self._evaluated: deque[_Fetched] = deque(maxlen=_MAX_EVALUATED)
        self._trained_from: weakref.ref[Any] | None = None  # the iterator of the batch that was used last
        self._num_used = 0
        self._num_forwarded = self._pending = self._most = 0
        self._counts_once: dict[int, bool] = {}
        self._is_shared = False

    def fetched(self, batch: Any, loader: Any, *, is_ahead: bool = False) -> None:
        """Note a batch that a loader's iterator has returned, to the thread that trains or to one that reads ahead."""
        size = first_dimension(batch)
        if size:
            self._has_loader = True
            self._fetched.append(_Fetched(size, weakref.ref(loader), is_ahead))
            if (
                len(self._fetched) > _MAX_FETCHED
            ):  # no module gets them; they count at the end of the step, which may be far
                half = _MAX_FETCHED // 2
                self._num_used += sum(batch.size for batch in self._fetched[:half])
                del self._fetched[:half]

    def forwarded(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the input of a module that is about to be trained."""
        batch = _first_tensor((args, kwargs), _DEPTH + 1)
        if batch is not None and batch.is_meta:
            return  # measures the model's operations, as Fabric's measure_flops does, and computes nothing
        size = 0 if batch is None else batch.shape[0]
        self._use_fetched(size)
        counts_once = self._counts_once.get(id(module))
        if counts_once is None:
            counts_once = self._counts_once[id(module)] = _has_batch_alone(module)
        self._is_shared = self._is_shared or not counts_once
        if not self._pending and not self._has_loader:
            self._pending = size

    def evaluated(self) -> None:
        """Set the batches aside that were fetched for an evaluation; a teacher may see those that a student gets."""
        self._evaluated.extend(batch for batch in self._fetched if batch.loader != self._trained_from)
        self._fetched = [batch for batch in self._fetched if batch.loader == self._trained_from]

    def backward_ended(self) -> None:
        """Count the input that gradients were computed for: where no module gets a batch, the oldest one."""
        if self._fetched and not self._counts_once:
            self._num_used += self._fetched.pop(0).size
        self._num_forwarded += self._pending
        self._pending = 0

    def optimizer_ended(self) -> None:
        """Begin another model's update, which may see the same samples again."""
        self._most = max(self._most, self._num_forwarded)
        self._num_forwarded = 0

    def take(self) -> int:
        """Return the samples since the last call; 0 where ranks share them."""
        self.optimizer_ended()
        # What no module has got, as in a step with several loaders, counts as well, but not the batch fetched ahead.
        if self._fetched:
            ahead = [batch for batch in self._fetched if batch.is_ahead]
            alive = [batch for batch in self._fetched if batch.loader() is not None and not batch.is_ahead]
            self._num_used += sum(batch.size for batch in alive[:-1])
            self._fetched = [*ahead, *alive[-1:]]
        self._evaluated.clear()
        num_samples = self._num_used if self._has_loader else self._most
        self._num_used = self._most = 0
        if self._is_shared:
            self.source = "not guessed: ranks share batches"
            return 0
        if num_samples:
            what = "the batches of DataLoaders" if self._has_loader else "the first input of the outermost module"
            self.source = f"a guess: the first dimension of {what}"
        return num_samples

    def _use_fetched(self, size: int) -> None:
        """Count the batch that a module gets; all that were fetched, if it gets another number of samples."""
        if not self._fetched:
            self._fetched = self._evaluated_before(size)
        fitting = [batch for batch in self._fetched if batch.size == size]
        # One that was fetched by itself, as for a look at its shape, comes second to the loop's own.
        used = next((batch for batch in fitting if batch.loader() is not None), fitting[0] if fitting else None)
        self._num_used += sum(batch.size for batch in self._fetched) if used is None else used.size
        if used is None:
            self._fetched.clear()
        else:
            self._fetched.remove(used)
            self._trained_from = used.loader

    def _evaluated_before(self, size: int) -> list[_Fetched]:
        """Return the batch set aside that a module gets now; models may see all of a step's without gradients first."""
        last = self._trained_from if self._num_used else self._evaluated[-1].loader if self._evaluated else None
        alive = [batch for batch in self._evaluated if batch.loader == last and batch.loader() is not None]
        found = next((batch for batch in alive if batch.size == size), None)
        if found is None:
            self._evaluated.clear()
            return alive[-1:]
        self._evaluated.remove(found)
        return [found]


@dataclass(eq=False, slots=True)
class _Fetched:
    size: int
    loader: weakref.ref[Any]
    is_ahead: bool = False


def first_dimension(value: Any, depth: int = _DEPTH) -> int:
    """Return the length of the first tensor in a batch along its first dimension, 0 without one."""
    tensor = _first_tensor(value, depth)
    return 0 if tensor is None else tensor.shape[0]


def _first_tensor(value: Any, depth: int = _DEPTH) -> torch.Tensor | None:
    """Return the first tensor in a batch that has something along its first dimension."""
    if isinstance(value, torch.Tensor):
        return value if value.ndim and value.shape[0] else None
    if not depth or value is None:
        return None
    # In the order of their cost: abstract classes take longer than all others.
    is_sequence = isinstance(value, (tuple, list))
    if is_sequence or isinstance(value, (dict, Mapping)):
        for part in value if is_sequence else value.values():
            tensor = _first_tensor(part, depth - 1)
            if tensor is not None:
                return tensor
    return None


def has_scalar(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether what a module returns has a single number in it, as a loss is."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    if not depth or value is None:
        return False
    is_sequence = isinstance(value, (tuple, list))
    parts = value if is_sequence else value.values() if isinstance(value, (dict, Mapping)) else ()
    return any(has_scalar(part, depth - 1) for part in parts)


def _has_batch_alone(module: Any) -> bool:
    """Return whether each rank gives a module batches of its own, as far as its class shows."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    if _is_called_by(_PIPELINES):
        return False
    group = getattr(module, "process_group", None)
    if isinstance(group, dist.ProcessGroup):  # DDP and FSDP
        return group.size() == dist.get_world_size()
    mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None:
        return True
    is_fully_sharded = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return is_fully_sharded and mesh.ndim == 1 and mesh.size() == dist.get_world_size()


def _is_called_by(packages: tuple[str, ...]) -> bool:
    """Return whether a function of one of several packages is among the callers."""
    loaded = tuple(package for package in packages if package in sys.modules)
    frame = sys._getframe() if loaded else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(loaded):
            return True
        frame = frame.f_back
    return False
