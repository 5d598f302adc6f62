"""The line that keeps faulty nodes out of the next job: the verdict, the page and the scripts of analysis/ share it."""

from __future__ import annotations

from collections.abc import Collection, Set

from hpcpace.errors import TraceError
from hpcpace.metrics.hostlist import exclude_line


def exclusion(faulty: Set[str], nodes: Collection[str]) -> str:
    """Return `#SBATCH --exclude=n[3,7-9]`; empty where it helps nobody.

    Args:
        faulty: names of the nodes to leave out.
        nodes: names of all nodes of the job; where all are faulty, or one is not of the job, no line is right.
    """
    try:
        return exclude_line(faulty) if faulty < set(nodes) else ""
    except TraceError:  # a name that no node of Slurm has
        return ""


def node_name(host: str) -> str:
    """Return the name by which Slurm knows a host that calls itself by its domain, too."""
    return host.partition(".")[0]
