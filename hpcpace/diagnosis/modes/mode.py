"""The modes: the reasons why a job does not scale, or does not reach its end."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Why a job does not scale."""

    ENDED = "ended early"
    HANG = "hang"
    STRAGGLER = "persistent straggler"
    IMBALANCE = "pipeline imbalance"
    CORES = "ranks share cores"
    RUNTIME = "runtime and control plane"
    CONTENTION = "fabric contention"
    LOCALITY = "locality"
    AMPLIFICATION = "synchronisation amplification"
    DATA = "work varies with the data"
    INPUT = "input-bound"
    HOST = "host-bound"
    COMMUNICATION = "communication-bound"
    HEALTHY = "healthy"
    CANNOT_TELL = "cannot tell"
