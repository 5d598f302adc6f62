"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, hang, nsys, ras, topology

KINDS = (*flight_recorder.KINDS, *hang.KINDS, *nsys.KINDS, *ras.KINDS, *topology.KINDS)
