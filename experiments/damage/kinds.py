"""All kinds of damage."""

from __future__ import annotations

from experiments.damage import bombs, content, journals, links, names, packs, tables

KINDS = (
    *content.KINDS,
    *journals.KINDS,
    *tables.KINDS,
    *tables.CLOCKS,
    *names.KINDS,
    *names.SURROUNDINGS,
    *journals.MIXED,
    *packs.KINDS,
    *links.KINDS,
    *bombs.KINDS,
)
