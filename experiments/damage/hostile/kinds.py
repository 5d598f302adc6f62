"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, kineto, nsys, topology, wia

KINDS = (
    *flight_recorder.KINDS,
    *kineto.KINDS,
    *nsys.KINDS,
    *topology.KINDS,
    *wia.KINDS,
)
