"""Topology files of Slurm, in its plain and its YAML form."""

from __future__ import annotations

from pathlib import Path

from experiments.damage.hostile.kind import Call, Hostile, Random

_FORMAT = "topology files"


def _brackets(folder: Path, random: Random) -> Call:
    del random
    path = folder / "topology.conf"
    path.write_text("SwitchName=s1 Nodes=" + "[" * 100_000 + "\n")
    return Call(arguments=("report", "--topology", str(path), str(folder)), num_bytes=path.stat().st_size)


KINDS = (Hostile(name="topology-brackets", format=_FORMAT, make=_brackets),)
