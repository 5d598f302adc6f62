"""All kinds of damage."""

from __future__ import annotations

from experiments.damage import bombs, clocks, content, journals, links, mixed, names, packs, runs, tables

KINDS = (
    *content.KINDS,
    *journals.KINDS,
    *tables.KINDS,
    *clocks.KINDS,
    *names.KINDS,
    *runs.KINDS,
    *mixed.KINDS,
    *packs.KINDS,
    *links.KINDS,
    *bombs.KINDS,
)
