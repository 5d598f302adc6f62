"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, nsys, topology

KINDS = (*flight_recorder.KINDS, *nsys.KINDS, *topology.KINDS)
