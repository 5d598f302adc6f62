"""All kinds of hostile files, for each format that somebody else's tool writes."""

from __future__ import annotations

from experiments.damage.hostile import dumps, json_files, junk, kineto, nsys, texts, wia

KINDS = (*texts.KINDS, *dumps.KINDS, *json_files.KINDS, *junk.KINDS, *kineto.KINDS, *nsys.KINDS, *wia.KINDS)
