"""All kinds of damage."""

from __future__ import annotations

from tests.damage import clocks, content, journals, names, runs, tables

KINDS = (*content.KINDS, *journals.KINDS, *tables.KINDS, *clocks.KINDS, *names.KINDS, *runs.KINDS)
