"""What a comparison with other runs takes from the summary of one, besides all else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ComparedRank:
    """How one rank compares with itself in another run.

    Attributes:
        work_ns: own work per step, the mean; None where it is not known.
        work_error: its standard error relative to it, over blocks of steps; None likewise, and for few steps.
        caused_wait_ns: exposed wait of all ranks that began at this one, mean over ranks and steps.
    """

    rank: int
    work_ns: float | None
    work_error: float | None
    caused_wait_ns: float


@dataclass(frozen=True, kw_only=True)
class Comparable:
    """What a comparison with other runs takes from this one besides all else; see docs/compare.md.

    Attributes:
        is_all: whether all steps but the warm-up were used, as by a report without `--steps`.
        samples_per_step: samples of the global batch, mean over the used steps.
        log_p50_error: standard error of the logarithm of the median step time by a block bootstrap over steps; None for
            fewer than 8 steps.
        log_mean_error: the same of the mean step time.
        block_p50_ns: median step times of up to 20 blocks of consecutive steps, in their order.
        ranks: ascending.
    """

    is_all: bool
    samples_per_step: float
    log_p50_error: float | None
    log_mean_error: float | None
    block_p50_ns: tuple[float, ...]
    ranks: tuple[ComparedRank, ...]
