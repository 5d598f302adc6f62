"""Initial weights that depend on the seed and their name alone, so that every mesh starts from the same model."""

from __future__ import annotations

import hashlib

import torch


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU that draws the same for a seed and a parameter's name on every rank."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
