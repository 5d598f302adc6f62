"""The settings of pacing, section `[pace]` of the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpcpace.core.errors import ConfigError
from hpcpace.core.text import NS_PER_MS, NS_PER_US

POLICIES = ("observe", "published-window", "published-spread", "slack", "coschedule", "stagger", "auto")
NO_POLICY = "none"

# Fewer pairs cannot reach p < 0.05 in a sign test: 2 * 2^-6 = 0.03.
MIN_PAIRS = 6


@dataclass(frozen=True, kw_only=True)
class PaceSettings:
    """How early ranks are held back, and how it is tried out."""

    policy: str = NO_POLICY
    """Rule that decides on delays; none: the job is not paced."""
    trial: bool = True
    """Whether the policy must show a gain in blocks with and without it; otherwise it is on from the start."""
    find_steps: int = 10
    """Steps after the warm-up in which hpcpace searches for the pacing point."""
    window_steps: int = 10
    """Steps between two exchanges of the ranks' waits; each carries the values of all these steps."""
    block_steps: int = 20
    """Steps per block of the trial; a multiple of window_steps."""
    dropped_steps: int = 4
    """Number of first steps of a block that do not count."""
    aa_pairs: int = 6
    """Pairs of unpaced blocks before the trial; they must show no effect."""
    max_pairs: int = 40
    """Pairs of a paced and an unpaced block after which a trial ends."""
    level: float = 0.05
    """Probability of seeing an effect by chance, over all looks at the trial together."""
    least_gain: float = 0.005
    """Smallest gain of interest; a trial that has ruled it out ends."""
    share_low: float = 0.5
    """Share of its slack by which a rank is delayed at first."""
    share_high: float = 0.8
    """Share of its slack by which a rank is delayed at most."""
    max_delay_share: float = 0.05
    """Largest delay, as a share of the median step."""
    polling_delay_share: float = 0.3
    """Largest delay of slack where ranks poll on shared cores, if it is larger: a short sleep gains nothing there."""
    guard_us: float = 200.0
    """Part of the slack that is never used."""
    guard_overshoots: float = 2.0
    """Further part of the slack that is never used, in units of the 99th percentile of how much too long sleeps last; 0
    where ranks poll on shared cores."""
    engage_share: float = 0.005
    """Delay at which pacing starts, as a share of the median step; it ends below half of that."""
    polling_engage_share: float = 0.1
    """Delay at which slack starts where ranks poll on shared cores, if it is larger: a shorter sleep gains nothing."""
    engage_steps: int = 16
    """Number of steps for which the delay must have been that large."""
    published_steps: int = 16
    """Number of past steps that the published rule uses."""
    published_variation: float = 0.1
    """Coefficient of variation of a rank's own waits above which published-window delays it."""
    published_spread: float = 0.05
    """Spread of the arrivals, as a share of the median step, above which published-spread delays ranks."""
    published_delay: float = 0.8
    """Share of its wait by which the published rule delays a rank; the paper does not state it."""
    gc_steps: int = 0
    """Steps between two garbage collections under coschedule; 0: as often as Python collected on its own."""
    stagger_slots: int = 0
    """Jobs that take turns on a link under stagger; 0: the ranks of this job take turns."""
    stagger_slot: int = 0
    """Turn of this job, from 0."""
    stagger_period_ms: float = 0.0
    """Time in which every job has one turn: the same in all jobs, and at least their longest step."""
    timeout_s: float = 30.0
    """Seconds after which an exchange is given up, and pacing with it; the job goes on."""

    def __post_init__(self) -> None:
        _check(self.policy in (NO_POLICY, *POLICIES), "policy", self.policy, f"one of none, {', '.join(POLICIES)}")
        for name, least, most in _RANGES:
            value = getattr(self, name)
            _check(least <= value <= most, name, value, f"from {least:g} to {most:g}")
        _check(
            self.block_steps % self.window_steps == 0,
            "block_steps",
            self.block_steps,
            f"a multiple of window_steps, {self.window_steps}",
        )
        half = self.block_steps // 2
        _check(self.dropped_steps <= half, "dropped_steps", self.dropped_steps, f"at most half of a block, {half}")
        _check(self.share_low <= self.share_high, "share_low", self.share_low, f"at most share_high, {self.share_high}")
        if self.stagger_slots:
            last = self.stagger_slots - 1
            _check(self.stagger_slot <= last, "stagger_slot", self.stagger_slot, f"from 0 to {last}")
            _check(self.stagger_period_ms > 0, "stagger_period_ms", self.stagger_period_ms, "above 0 with slots")

    def where_polled(self) -> PaceSettings:
        """Return the same for ranks that poll on shared cores.

        There a sleep lasts too long because others compute on that core meanwhile, which is what it is for.
        """
        return replace(
            self,
            max_delay_share=max(self.max_delay_share, self.polling_delay_share),
            engage_share=max(self.engage_share, self.polling_engage_share),
            guard_overshoots=0.0,
        )

    @property
    def is_on(self) -> bool:
        """Whether the job is paced."""
        return self.policy != NO_POLICY

    @property
    def guard_ns(self) -> float:
        """The fixed part of the guard in nanoseconds."""
        return self.guard_us * NS_PER_US

    @property
    def stagger_period_ns(self) -> int:
        """The period of the jobs' turns in nanoseconds."""
        return round(self.stagger_period_ms * NS_PER_MS)


_RANGES = (
    ("find_steps", 2, 1000),
    ("window_steps", 2, 100),
    ("block_steps", 10, 1000),
    ("dropped_steps", 0, 500),
    ("aa_pairs", 0, 1000),
    ("max_pairs", MIN_PAIRS, 1000),
    ("level", 0.001, 0.2),
    ("least_gain", 0.0, 1.0),
    ("share_low", 0.05, 0.95),
    ("share_high", 0.05, 0.95),
    ("max_delay_share", 0.001, 0.5),
    ("polling_delay_share", 0.0, 0.5),
    ("guard_us", 0.0, 1e6),
    ("guard_overshoots", 0.0, 100.0),
    ("engage_share", 0.0001, 0.5),
    ("polling_engage_share", 0.0, 0.5),
    ("engage_steps", 1, 1000),
    ("published_steps", 4, 1000),
    ("published_variation", 0.0, 100.0),
    ("published_spread", 0.0, 100.0),
    ("published_delay", 0.0, 2.0),
    ("gc_steps", 0, 100_000),
    ("stagger_slots", 0, 64),
    ("stagger_slot", 0, 63),
    ("stagger_period_ms", 0.0, 1e6),
    ("timeout_s", 1.0, 3600.0),
)


def _check(is_right: bool, name: str, value: object, wanted: str) -> None:
    if not is_right or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"pace.{name} is {value!r}: it must be {wanted}")
