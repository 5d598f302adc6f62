"""All kinds of inputs: of damaged runs, and of hostile files in the formats that somebody else's tool writes."""

from __future__ import annotations

from experiments.damage import bombs, content, journals, json_files, links, names, tables, texts, tools

DAMAGED = (*content.KINDS, *journals.KINDS, *tables.KINDS, *names.KINDS, *links.KINDS, *bombs.KINDS)
HOSTILE = (*texts.KINDS, *json_files.KINDS, *tools.KINDS)
