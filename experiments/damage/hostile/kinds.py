"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import (
    csv_files,
    flight_recorder,
    hang,
    history,
    junk,
    kineto,
    nsys,
    probe,
    ras,
    records,
    settings,
    snapshots,
    topology,
    wia,
)

KINDS = (
    *csv_files.KINDS,
    *flight_recorder.KINDS,
    *hang.KINDS,
    *history.KINDS,
    *junk.KINDS,
    *kineto.KINDS,
    *nsys.KINDS,
    *probe.KINDS,
    *ras.KINDS,
    *records.KINDS,
    *settings.KINDS,
    *snapshots.KINDS,
    *topology.KINDS,
    *wia.KINDS,
)
