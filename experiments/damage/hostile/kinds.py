"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import csv_files, records, topology

KINDS = (*csv_files.KINDS, *records.KINDS, *topology.KINDS)
