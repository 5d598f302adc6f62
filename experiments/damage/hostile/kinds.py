"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import topology

KINDS = (*topology.KINDS,)
