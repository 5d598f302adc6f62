"""The placement for the next run of a job, from the traffic and the hosts of a recorded one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.frames.run import Run
from hpcpace.metrics import Ints
from hpcpace.metrics.phases import EXPOSED_TRANSFER
from hpcpace.metrics.topology import split_address
from hpcpace.placement.assign import PlacementThresholds, Volumes, better_host, levels_between, volumes
from hpcpace.placement.traffic import traffic_per_step


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a run were, and where they would send less.

    Attributes:
        names: of the hosts, as Slurm knows them.
        before, after: host of each rank, index into `names`, int64, (num_ranks,); equal where the run's is good.
        volumes_before, volumes_after: bytes of a step.
        exposed_share: part of step time in which the most affected rank waits for data on their way, in all
            operations; None where the traces do not show it.
    """

    names: tuple[str, ...]
    before: Ints
    after: Ints
    volumes_before: Volumes
    volumes_after: Volumes
    exposed_share: float | None

    @property
    def num_moved(self) -> int:
        """Ranks that change their host."""
        return int((self.before != self.after).sum())

    @cached_property
    def max_gain_share(self) -> float | None:
        """Upper bound on what step time shrinks by, a share; None where the traces do not show it.

        The model: exposed transfers shrink by the share by which bytes over uplinks do, or bytes between hosts where
        none cross uplinks. It is a bound, since some of these transfers stay below a leaf or a host.
        """
        if self.exposed_share is None:
            return None
        is_below_leaves = self.volumes_before.uplink_bytes == self.volumes_after.uplink_bytes
        before, after = (
            one.host_bytes if is_below_leaves else one.uplink_bytes for one in (self.volumes_before, self.volumes_after)
        )
        return self.exposed_share * max(1 - after / before, 0.0) if before else 0.0


def place_run(run: Run) -> Placement:
    """Return the better placement of a run, or that which it had.

    Raises:
        CannotTell: the run hung, lacks ranks, ran on one host, or the switches of its hosts are not known.
    """
    judged = run.judged
    _check(judged)
    places = judged.measured.places
    headers = [trace.header for trace in judged.credible.traces]
    path_of = {
        node: split_address(header.topology_addr, header.host)[0]
        for node, header in zip(places.node.tolist(), headers, strict=True)
    }
    levels = levels_between([path_of[node] for node in range(places.num_nodes)])
    traffic = traffic_per_step(run.columns("collectives"), len(headers), run.num_steps)
    after = better_host(traffic, places.node, levels, judged.limits(PlacementThresholds))
    return Placement(
        names=places.slurm_names,
        before=places.node,
        after=after,
        volumes_before=volumes(traffic, places.node, levels),
        volumes_after=volumes(traffic, after, levels),
        exposed_share=_exposed_share(judged),
    )


def _check(judged: JudgedAttempt) -> None:
    """Refuse a run from which no placement follows.

    Raises:
        CannotTell: see `place_run`.
    """
    judged.check_whole()
    places = judged.measured.places
    if places.num_nodes < 2:
        raise CannotTell(f"the run had one host ({places.node_names[0]}): there is nothing to place")
    if len(set(places.slurm_names)) < places.num_nodes:
        raise CannotTell("several hosts of the run have one name: a placement cannot tell them apart")
    if not places.num_leaves:
        why = "".join(f"; {problem}" for problem in judged.placed.problems)
        raise CannotTell(f"the leaf switches of its hosts are not known{why}: name a file with --topology")


def _exposed_share(judged: JudgedAttempt) -> float | None:
    """Return the largest share over ranks of step time in exposed transfers; None where parts are not known."""
    measured = judged.measured
    exposed_ns = measured.spent_ns(EXPOSED_TRANSFER)
    if measured.host_timed or measured.unknown or measured.unknown_waits or not np.isfinite(exposed_ns).all():
        return None
    return float((exposed_ns.sum(axis=1) / measured.lengths_ns.sum(axis=1)).max())
