"""Pacing as part of a job: its messages between the ranks, and its result in trial.json.

The messages use a gloo group of their own; if torch does not connect the ranks, they use MPI. Each is waited for in a
thread of its own, because the others may wait for this rank in the training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo
from hpcpace.core.rundir import Attempt
from hpcpace.pace.choice import RankProfile, core_names
from hpcpace.pace.pacer import Pacer, PacingRecord
from hpcpace.pace.rounds import PacingTrace
from hpcpace.pace.settings import PaceSettings
from hpcpace.world.deadline import Started
from hpcpace.world.messages import GlooMessages, Messages, MpiMessages

_WHAT = "the exchange of waits between the ranks"


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
    messages = _open_messages(comm, world.world_size, settings.timeout_s)
    is_in_threads = messages is not None and messages.works_in_any_thread
    return partial(
        JobPacer,
        settings,
        attempt,
        rank=world.rank,
        exchange=ThreadedExchange(messages) if messages is not None and is_in_threads else None,
        obstacle="" if messages is None or is_in_threads else "MPI takes calls from one thread only",
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


class ThreadedExchange:
    """Messages that are waited for in other threads; see `hpcpace.pace.rounds.Exchange`."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def allgather(self, value: Any) -> Started[list[Any]]:
        """Send a value to all ranks."""
        return Started(partial(self._messages.allgather, value), _WHAT)

    def minimum(self, values: Sequence[float]) -> Started[list[float]]:
        """Send values to all ranks."""
        return Started(partial(self._messages.minimum, values), _WHAT)

    def close(self) -> None:
        """Free all resources."""
        self._messages.close()


class JobPacer(Pacer):
    """Paces one rank of a job; see Pacer.

    Args:
        obstacle: why it is not paced; empty where it is, and in a world of one.
    """

    def __init__(
        self, settings: PaceSettings, attempt: Attempt, trace: PacingTrace, *, obstacle: str, **facts: Any
    ) -> None:
        super().__init__(settings, trace=trace, **facts)
        self._attempt = attempt
        self._record.reason = obstacle or self._record.reason

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
