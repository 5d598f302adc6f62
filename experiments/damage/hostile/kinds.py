"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import flight_recorder, hang, history, kineto, nsys, probe, ras, settings, topology, wia

KINDS = (
    *flight_recorder.KINDS,
    *hang.KINDS,
    *history.KINDS,
    *kineto.KINDS,
    *nsys.KINDS,
    *probe.KINDS,
    *ras.KINDS,
    *settings.KINDS,
    *topology.KINDS,
    *wia.KINDS,
)
