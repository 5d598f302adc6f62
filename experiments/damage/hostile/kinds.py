"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import kineto, topology, wia

KINDS = (*kineto.KINDS, *topology.KINDS, *wia.KINDS)
