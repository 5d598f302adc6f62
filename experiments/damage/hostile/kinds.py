"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import probe, topology

KINDS = (*probe.KINDS, *topology.KINDS)
