"""Whether a training job without torch's optimizers has changed its parameters or gradients since its last backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_SAMPLED = 64
_MOST_MODULES = 64
_PART_OF_DTENSOR = "_local_tensor"


class ParameterProbe:
    """Looks at the last parameter of the module that ran last; without one, it knows nothing."""

    def __init__(self) -> None:
        self._parameter: Any = None
        self._seen: Any = None
        self._last_of: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def forward_begins(self, module: torch.nn.Module) -> None:
        """Note the module that will be trained."""
        self._parameter = self._known(id(module))
        if self._parameter is not None:
            return
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._parameter = parameter
                    self._last_of[id(module)] = (weakref.ref(owner), name)
        if len(self._last_of) > _MOST_MODULES:
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
