"""Reads a topology file of any of the known forms, which are told apart by what is in them."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from hpcpace.core.errors import TopologyError
from hpcpace.core.files import read_file
from hpcpace.topology.host_table import parse_host_table
from hpcpace.topology.slurm_text import is_slurm_text, parse_slurm_text
from hpcpace.topology.slurm_yaml import is_slurm_yaml, parse_slurm_yaml
from hpcpace.topology.switch_tree import SwitchTree

# Files of 65,536 hosts have less than one, also where each host has a line.
_MAX_BYTES = 4 << 20
_MAX_PROBLEMS = 4


def read_topology(path: Path) -> list[SwitchTree]:
    """Return the networks of a file: one, or of topology.yaml all, the cluster's default first.

    Args:
        path: topology.conf, topology.yaml, the saved output of `scontrol show topology`, or `host leaf spine` a line.

    Raises:
        TopologyError: it cannot be read, is none of these, or has no hosts.
    """
    try:
        content = read_file(Path(os.path.realpath(path)), most_bytes=_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise TopologyError(f"cannot read the topology {path}: {reason}") from None
    try:
        trees = _parsed(content, is_yaml=path.suffix in (".yaml", ".yml"))
    except TopologyError as error:
        raise TopologyError(f"topology {path}: {error}") from None
    if not any(tree.above for tree in trees):
        problems = "; ".join(islice((problem for tree in trees for problem in tree.problems), _MAX_PROBLEMS))
        raise TopologyError(f"topology {path} has no host at a switch{f' ({problems})' if problems else ''}")
    return trees


def _parsed(content: str, *, is_yaml: bool) -> list[SwitchTree]:
    if "\0" in content:
        raise TopologyError("it is no text")
    if is_slurm_text(content):
        return [parse_slurm_text(content)]
    if is_yaml or is_slurm_yaml(content):
        return parse_slurm_yaml(content)
    return [parse_host_table(content)]
