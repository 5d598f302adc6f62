"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, history, kineto, nsys, settings, topology, wia

KINDS = (
    *flight_recorder.KINDS,
    *history.KINDS,
    *kineto.KINDS,
    *nsys.KINDS,
    *settings.KINDS,
    *topology.KINDS,
    *wia.KINDS,
)
