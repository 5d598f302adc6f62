"""Imports torchvision as it comes from PyPI, also beside a torch without CUDA.

The operators of that wheel do not load there, and its import fails where it describes them, as does whatever imports it
in passing, like transformers. No benchmark uses them.
"""

from __future__ import annotations

import re
from types import ModuleType

import torch

_MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def load_torchvision() -> ModuleType:
    """Return torchvision, with its missing operators declared; call it before other packages look for torchvision."""
    while True:
        try:
            import torchvision

            return torchvision
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor boxes) -> Tensor")
