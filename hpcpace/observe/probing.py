"""A probe inside a job: before its first step or after its last one, for a limited time, apart from its own groups.

Whatever fails, the job goes on: every wait has a timeout, and a failure is one warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from hpcpace.config import ProbeConfig
from hpcpace.core.environment import RankInfo
from hpcpace.core.rundir import Attempt
from hpcpace.world.gloo import own_store

START, END = "start", "end"


def probe_in_job(
    when: str,
    settings: ProbeConfig,
    *,
    world: RankInfo,
    attempt: Attempt,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
) -> None:
    """Probe the hosts of a job if that is wanted now, and save the probe with the attempt.

    Collective: every rank of the job calls this.

    Args:
        when: `start` or `end`, whichever it is now.
        settings: when it is wanted, and for how long.
        world: this rank's place.
        attempt: where the probe is saved.
        environ: of this rank.
        warn: takes a warning on why there is no probe.
    """
    if settings.when != when or world.world_size < 2:
        return
    try:
        _probe(when, settings, world=world, attempt=attempt, environ=environ)
    except Exception as error:  # the boundary to somebody else's job
        warn(f"the job is not probed ({str(error).partition(chr(10))[0] or type(error).__name__})")


def _probe(when: str, settings: ProbeConfig, *, world: RankInfo, attempt: Attempt, environ: Mapping[str, str]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed connects no ranks")
    # Imported this late because most jobs are not probed.
    from hpcpace.probe.start import begin_record, probe_world
    from hpcpace.probe.sweep import Sweep
    from hpcpace.probe.world import measure_parts

    store, _ = own_store(settings.timeout_s)
    own = torch.distributed.PrefixStore(f"probe/{attempt.path}/{when}", store)
    is_on_gpu = torch.cuda.is_available() and "nccl" in torch.distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
    ranks = probe_world(
        world, own, device=device, backend="nccl" if is_on_gpu else "gloo", timeout_s=settings.timeout_s
    )
    record = begin_record(ranks, environ, time_s=settings.time_s)
    record = measure_parts(ranks, [Sweep()], record)
    if ranks.is_first:
        attempt.write_json(attempt.probe_json, record.to_json())
