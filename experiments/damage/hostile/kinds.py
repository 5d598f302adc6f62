"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, topology

KINDS = (*flight_recorder.KINDS, *topology.KINDS)
