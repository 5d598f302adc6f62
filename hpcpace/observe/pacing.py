"""Pacing as part of a session: opens the pacer, closes it with trial.json and one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from hpcpace.core.environment import RankInfo
from hpcpace.core.rundir import Attempt
from hpcpace.observe.recording import Recording
from hpcpace.pace.arrivals import Arrival
from hpcpace.pace.exchange import Exchange
from hpcpace.pace.mechanisms import RankProfile, core_names
from hpcpace.pace.pacer import Pacer
from hpcpace.pace.settings import PaceSettings


def open_pacer(
    settings: PaceSettings,
    *,
    world: RankInfo,
    host_key: str,
    exchange: Exchange | None,
    recording: Recording,
    first_step: int,
    warn: Callable[[str], None],
) -> Pacer:
    """Return the pacer of this rank; the recording calls it where the rank is blocked.

    Args:
        settings: how; the policy is not `none`.
        world: this rank's place.
        host_key: equal on ranks of one host.
        exchange: as `open_exchange` returns it.
        recording: not started yet.
        first_step: the first step after the warm-up.
        warn: takes a warning.
    """
    pacer = Pacer(
        settings,
        rank=world.rank,
        exchange=exchange,
        profile=RankProfile(host_key=host_key, cores=core_names(sorted(os.sched_getaffinity(0)))),
        first_step=first_step,
        trace=recording,
        warn=warn,
    )
    recording.pace_by(pacer)
    pacer.start()
    return pacer


def close_pacer(pacer: Pacer, attempt: Attempt, rank: int, *, in_order: bool, warn: Callable[[str], None]) -> None:
    """End pacing; rank 0 writes trial.json. Collective if `in_order`."""
    record = pacer.close(in_order=in_order)
    if rank != 0:
        return
    print(f"hpcpace: {record.sentence()}", file=sys.stderr, flush=True)
    try:
        attempt.write_json(attempt.trial_json, record.to_json())
    except OSError as error:
        warn(f"cannot write {attempt.trial_json}: {error.strerror}")


class PacedBlock:
    """A block of the caller's own that waits for all other ranks: `with session.pacing_point(): comm.Allreduce(...)`.

    Args:
        pacer: of this rank.
        name: what the point is called.
        num_ranks: ranks of the job.
    """

    def __init__(self, pacer: Pacer, name: str, num_ranks: int) -> None:
        self._pacer = pacer
        self._name = name
        self._num_ranks = num_ranks
        self._arrival: Arrival | None = None

    def __enter__(self) -> None:
        self._arrival = self._pacer.arrive(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        arrival, self._arrival = self._arrival, None
        if kind is None:
            self._pacer.leave(arrival, tuple(range(self._num_ranks)))
