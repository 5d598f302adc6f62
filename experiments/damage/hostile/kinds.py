"""All kinds of hostile files, by format."""

from __future__ import annotations

from experiments.damage.hostile import history, settings, topology

KINDS = (*topology.KINDS, *settings.KINDS, *history.KINDS)
