"""What could make pacing pay in this job: each mechanism with the facts that show it.

Waiting alone costs nothing that pacing could recover: a synchronous step ends when its slowest rank arrives. Delaying a
rank helps only if its early arrival hurts others: it polls on a core that another rank needs, it sends to one rank at
the same time as many others, or it does on its own step what all ranks could do on the same step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcpace.pace.pacing_points import PacingPoint

POLLING = "polling on shared cores"
# Share of a wait that the waiting thread would spend on a core of its own: 1 if it polls, nearly 0 if it sleeps.
_POLLING_SHARE = 0.4
_GC_SHARE = 0.002
_MANY_TO_ONE = "gather"
_LEAST_SENDERS = 4
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """How a rank runs and waits, as seen in the first steps.

    Attributes:
        host_key: equal on ranks of one host.
        cores: names of the cores that it may run on.
        polling_share: processor time of its waits over their duration.
        gc_share: share of its steps spent in full garbage collections.
        waits_on_device: whether its collectives run on a GPU, where the host does not wait.
    """

    host_key: str
    cores: frozenset[str]
    polling_share: float = 0.0
    gc_share: float = 0.0
    waits_on_device: bool = False

    def on_device(self) -> RankProfile:
        """Return the same profile for a rank whose collectives run on a GPU."""
        return self if self.waits_on_device else replace(self, waits_on_device=True)

    def measured(self, *, polling_share: float, gc_share: float) -> RankProfile:
        """Return the same profile with the measurements of the first steps."""
        return replace(self, polling_share=polling_share, gc_share=gc_share)


def crowding(ranks: Sequence[RankProfile]) -> float:
    """Return the ranks per core on the most crowded host."""
    cores: dict[str, set[str]] = defaultdict(set)
    num_ranks: dict[str, int] = defaultdict(int)
    for rank in ranks:
        cores[rank.host_key] |= rank.cores
        num_ranks[rank.host_key] += 1
    return max(num_ranks[host] / max(len(cores[host]), 1) for host in cores)


def find_mechanisms(ranks: Sequence[RankProfile], points: Sequence[PacingPoint]) -> list[str]:
    """Return the names of the mechanisms that could make pacing pay; empty if there are none.

    `polling on shared cores` and `garbage collection` are measured; `many to one`, a pacing point at which at least
    four ranks send to one, says only that buffers may overflow there.
    """
    found = []
    # Of several pollers on a core, each gets its part of it.
    polling_share = max(rank.polling_share for rank in ranks) * crowding(ranks)
    if crowding(ranks) > 1 and polling_share > _POLLING_SHARE:
        found.append(POLLING)
    if any(point.kind == _MANY_TO_ONE and len(point.ranks) > _LEAST_SENDERS for point in points):
        found.append("many to one")
    if len(ranks) > 1 and any(rank.gc_share > _GC_SHARE for rank in ranks):
        found.append("garbage collection")
    return found


def policy_for(mechanisms: Sequence[str], *, has_turns: bool) -> str:
    """Return the policy that `auto` tries.

    Args:
        mechanisms: as `find_mechanisms` returns them.
        has_turns: whether the settings give this job a turn on a shared link.
    """
    if POLLING in mechanisms:
        return "slack"
    # Full collections are too rare to show in the first steps: coschedule counts them in the trial's unpaced part.
    return "stagger" if has_turns or "many to one" in mechanisms else "coschedule"


def core_names(cpus: Sequence[int], *, root: Path = Path("/")) -> frozenset[str]:
    """Return the cores of some CPUs, with hardware threads of a core as one; a CPU unknown to sysfs is a core.

    Args:
        cpus: numbers of CPUs, as in `os.sched_getaffinity`.
        root: replaced in tests.
    """
    names = set()
    for cpu in cpus:
        path = root / _SIBLINGS.format(cpu).lstrip("/")
        try:
            names.add(path.read_text().strip() or str(cpu))
        except OSError:
            names.add(str(cpu))
    return frozenset(names)
