"""What ranks had of the cores of their hosts, where they wait for them: the evidence of ranks that share cores."""

from __future__ import annotations

import numpy as np

from hpcpace.diagnosis.modes.cores import is_notable
from hpcpace.diagnosis.modes.finding import Panels
from hpcpace.diagnosis.summary import HostCores


def core_figures(panels: Panels) -> tuple[HostCores, ...]:
    """Return the hosts on which some rank waits notably for a core, the one of the longest waiting first."""
    use = panels.cores
    if use is None:
        return ()
    rows = []
    for node in np.unique(panels.node[is_notable(use)]).tolist():
        near = np.flatnonzero(panels.node == node)
        rows.append(
            HostCores(
                host=panels.host[near[0]],
                num_ranks=len(near),
                num_cpus=len(frozenset().union(*(use.cpus[row] for row in near))),
                running=float(np.nansum(use.running[near])),
                ready=float(np.nansum(use.running[near] + use.queued[near])),
                waiting=float(np.nanmax(use.waiting[near])),
                pressure=float(np.nanmax(use.pressure[near])),
                throttled=float(np.nanmax(use.throttled[near])),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.waiting))
