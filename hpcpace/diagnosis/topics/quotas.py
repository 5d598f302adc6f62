"""CPU quotas that stop ranks: whose they are, how many cores they allow, and the files that set them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, percent, printable
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import MAX_NAMED, CpuQuota, Panels
from hpcpace.metrics import Bools
from hpcpace.metrics.host_waits import CoreUse


@dataclass(frozen=True, kw_only=True)
class QuotaThresholds(Thresholds, topic="cores"):
    """When a CPU quota holds ranks up."""

    throttled_part: float = number(0.5, "share")
    """Part of the longest wait for a core for which the quota must throttle ranks to be named as the reason."""
    notable_throttled_share: float = number(0.1, "share")
    """Share of the time for which a quota must stop a rank, in a lab beyond what it stops the ranks of other hosts."""
    used_part: float = number(0.7, "share")
    """Part of a known quota that the ranks of a host must use for it to be the reason, however long they wait: nothing
    else can give them more."""
    uneven_share: float = number(0.1, "share")
    """Share of the time by which quotas stop the ranks of some hosts for longer than those of others, from which these
    hosts are named."""


@dataclass(frozen=True, kw_only=True)
class StoppedByQuota:
    """Ranks that a CPU quota stops.

    Attributes:
        rows: their indices, those that are stopped longest first.
        share: of the time, of the first.
        others_share: the same of the host that is stopped least.
        is_uneven: whether they are stopped for longer than others.
        quota: of the first; None where it is not known.
        others: cores that quotas allow on other hosts; None where that is not known, or there is none.
    """

    rows: tuple[int, ...]
    share: float
    others_share: float
    is_uneven: bool
    quota: CpuQuota | None
    others: float | None


def stopped_by_quota(panels: Panels, use: CoreUse, limits: QuotaThresholds) -> StoppedByQuota | None:
    """Return the ranks that a quota stops for a notable share of the time; None where none does."""
    throttled = np.nan_to_num(np.minimum(use.throttled, np.fmax(use.waiting, 0.0)))
    waiting = np.nan_to_num(use.waiting) - (use.lab_waiting or 0.0)
    is_stopped: Bools = throttled - (use.lab_throttled or 0.0) >= limits.notable_throttled_share
    is_stopped &= (throttled >= limits.throttled_part * waiting) | _are_used_up(panels, use, limits.used_part)
    if not is_stopped.any():
        return None
    of_hosts = [float(throttled[panels.node == node].max()) for node in np.unique(panels.node)]
    is_longer: Bools = is_stopped & (throttled - min(of_hosts) >= limits.uneven_share)
    named = is_longer if is_longer.any() else is_stopped
    rows = sorted(np.flatnonzero(named).tolist(), key=lambda row: -throttled[row])
    quotas = _quotas(panels)
    others = [quotas[row] for row in np.flatnonzero(~np.isin(panels.node, panels.node[rows])).tolist()]
    return StoppedByQuota(
        rows=tuple(rows),
        share=float(throttled[rows[0]]),
        others_share=min(of_hosts),
        is_uneven=bool(is_longer.any()),
        quota=quotas[rows[0]],
        others=min((quota.cores for quota in others if quota is not None), default=None),
    )


def _are_used_up(panels: Panels, use: CoreUse, part: float) -> Bools:
    """Return whether the ranks of each rank's host use about all that its quota allows, bool, (num_ranks,).

    What counts is how much they get while they have something to run: a quota stops a rank that computes for a tenth of
    a step, too, and with it all of its threads, which together wait for several times as long as it is stopped.
    """
    while_ready = use.running
    if use.work is not None:
        running_ns, queued_ns = use.work.running_ns.sum(axis=1), use.work.queued_ns.sum(axis=1)
        of_work = running_ns / np.maximum(running_ns + queued_ns, 1.0)
        while_ready = np.where(use.work.is_known, np.fmax(use.running, of_work), use.running)
    running = np.array([float(np.nansum(while_ready[panels.node == node])) for node in panels.node])
    allowed = np.array([np.inf if quota is None else quota.cores for quota in _quotas(panels)])
    return np.asarray(running >= part * allowed)


def _quotas(panels: Panels) -> tuple[CpuQuota | None, ...]:
    return panels.quotas or (None,) * len(panels.rank)


def quota_headline(stopped: StoppedByQuota, hosts: Sequence[str], first_host: str) -> str:
    """Return the line that names a quota.

    Args:
        stopped: the ranks that it stops.
        hosts: their hosts.
        first_host: that of the rank which is stopped longest.
    """
    where = listed([printable(host) for host in hosts[:MAX_NAMED]])
    often = f"stops ranks there for up to {percent(stopped.share)} of the time"
    if stopped.quota is None:
        return f"ranks share cores: the CPU quota of the cgroup on {where} is used up; it {often}"
    at = "" if len(hosts) == 1 else f" on {printable(first_host)}"
    return (
        f"CPU quota: {where} may use {_cores(stopped.quota.cores)}{at} ({printable(stopped.quota.file)}); that {often}"
    )


def quota_why(stopped: StoppedByQuota) -> list[str]:
    """Return how others fare."""
    if not stopped.is_uneven:
        return []
    cores = "" if stopped.others is None else f", with a quota of {_cores(stopped.others)}"
    return [f"on other hosts, ranks are stopped for {percent(stopped.others_share)} of the time{cores}"]


def quota_advice(stopped: StoppedByQuota) -> str:
    """Return what to do about a quota."""
    fewer = "or start fewer ranks or threads there"
    if stopped.quota is None:
        return f"raise the quota (cpu.max of the cgroup; srun -c N), {fewer}"
    return (
        "raise the quota: the limit of the container, pod or slice that sets this file (systemctl set-property SLICE "
        f"CPUQuota=), or srun -c N; {fewer}"
    )


def _cores(number_of_them: float) -> str:
    return f"{number_of_them:.3g} {'core' if number_of_them == 1 else 'cores'}"
