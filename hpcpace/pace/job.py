"""Pacing as part of a job: its messages between the ranks, and its result in trial.json.

The messages use a gloo group of their own, whose threads carry them while the rank computes; if torch does not connect
the ranks, they use MPI. No rank waits longer than a timeout for another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo
from hpcpace.core.rundir import Attempt
from hpcpace.pace.choice import RankProfile, core_names
from hpcpace.pace.pacer import Pacer, PacingRecord
from hpcpace.pace.rounds import PacingTrace
from hpcpace.pace.settings import PaceSettings
from hpcpace.world.messages import GlooMessages, Messages, MpiMessages


def open_pacing(
    config: Config,
    *,
    comm: Any,
    world: RankInfo,
    host_key: str,
    attempt: Attempt,
    first_step: int,
    warn: Callable[[str], None],
) -> Callable[[PacingTrace], JobPacer]:
    """Connect the ranks, and return what makes the pacer of this rank. Collective: every rank of the job calls this.

    Args:
        config: its section `[pace]` has a policy.
        comm: an MPI communicator of all ranks, or None.
        world: this rank's place.
        host_key: equal on ranks of one host.
        attempt: the folder that takes trial.json.
        first_step: the first step after the warm-up.
        warn: takes a warning.
    """
    settings = config.of(PaceSettings)
    return partial(
        JobPacer,
        settings,
        attempt,
        rank=world.rank,
        exchange=_open_messages(comm, world.world_size, settings.timeout_s),
        profile=RankProfile(host_key=host_key, cores=core_names(sorted(os.sched_getaffinity(0)))),
        first_step=first_step,
        warn=warn,
    )


def _open_messages(comm: Any, num_ranks: int, timeout_s: float) -> Messages | None:
    if num_ranks == 1:
        return None
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() == num_ranks:
        return GlooMessages("pace", timeout_s)
    return MpiMessages(comm, timeout_s)


class JobPacer(Pacer):
    """Paces one rank of a job; see Pacer."""

    def __init__(self, settings: PaceSettings, attempt: Attempt, trace: PacingTrace, **facts: Any) -> None:
        super().__init__(settings, trace=trace, **facts)
        self._attempt = attempt

    def close(self, *, in_order: bool) -> PacingRecord:
        """End pacing; rank 0 prints the result and writes trial.json. Collective if `in_order`."""
        record = super().close(in_order=in_order)
        if self._rank == 0:
            print(f"hpcpace: {record.sentence()}", file=sys.stderr, flush=True)
            try:
                self._attempt.write_json(self._attempt.trial_json, record.to_json())
            except OSError as error:
                self._warn(f"cannot write {self._attempt.trial_json}: {error.strerror}")
        return record
