"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import csv_files, junk, records, snapshots, topology

KINDS = (*csv_files.KINDS, *junk.KINDS, *records.KINDS, *snapshots.KINDS, *topology.KINDS)
