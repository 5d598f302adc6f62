"""How early ranks are held back, and how that is tried out: the settings of `[pace]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpcpace.core.config import NO_POLICY, Section, number
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_US

POLICIES = ("observe", "published-window", "published-spread", "slack", "coschedule", "stagger", "auto")

# Fewer pairs cannot reach p < 0.05 in a sign test: 2 * 2^-6 = 0.03.
MIN_PAIRS = 6


@dataclass(frozen=True, kw_only=True)
class PaceSettings(Section, section="pace"):
    """How early ranks are held back, and how it is tried out."""

    policy: str = NO_POLICY
    """Rule that decides on delays; none: the job is not paced."""
    trial: bool = True
    """Whether the policy must show a gain in blocks with and without it; otherwise it is on from the start."""
    find_steps: int = number(10, 2, 1000)
    """Steps after the warm-up in which hpcpace searches for the pacing point."""
    window_steps: int = number(10, 2, 100)
    """Steps between two exchanges of the ranks' waits; each carries the values of all these steps."""
    block_steps: int = number(20, 10, 1000)
    """Steps per block of the trial; a multiple of window_steps."""
    dropped_steps: int = number(4, 0, 500)
    """Number of first steps of a block that do not count."""
    aa_pairs: int = number(6, 0, 1000)
    """Pairs of unpaced blocks before the trial; they must show no effect."""
    max_pairs: int = number(40, MIN_PAIRS, 1000)
    """Pairs of a paced and an unpaced block after which a trial ends."""
    level: float = number(0.05, 0.001, 0.2)
    """Probability of seeing an effect by chance, over all looks at the trial together."""
    least_gain: float = number(0.005, 0.0, 1.0)
    """Smallest gain of interest; a trial that has ruled it out ends."""
    share_low: float = number(0.5, 0.05, 0.95)
    """Share of its slack by which a rank is delayed at first."""
    share_high: float = number(0.8, 0.05, 0.95)
    """Share of its slack by which a rank is delayed at most."""
    max_delay_share: float = number(0.05, 0.001, 0.5)
    """Largest delay, as a share of the median step."""
    polling_delay_share: float = number(0.3, 0.0, 0.5)
    """Largest delay of slack where ranks poll on shared cores, if it is larger: a short sleep gains nothing there."""
    guard_us: float = number(200.0, 0.0, 1e6)
    """Part of the slack that is never used."""
    guard_overshoots: float = number(2.0, 0.0, 100.0)
    """Further part of the slack that is never used, in units of the 99th percentile of how much too long sleeps last; 0
    where ranks poll on shared cores."""
    engage_share: float = number(0.005, 0.0001, 0.5)
    """Delay at which pacing starts, as a share of the median step; it ends below half of that."""
    polling_engage_share: float = number(0.1, 0.0, 0.5)
    """Delay at which slack starts where ranks poll on shared cores, if it is larger: a shorter sleep gains nothing."""
    engage_steps: int = number(16, 1, 1000)
    """Number of steps for which the delay must have been that large."""
    published_steps: int = number(16, 4, 1000)
    """Number of past steps that the published rule uses."""
    published_variation: float = number(0.1, 0.0, 100.0)
    """Coefficient of variation of a rank's own waits above which published-window delays it."""
    published_spread: float = number(0.05, 0.0, 100.0)
    """Spread of the arrivals, as a share of the median step, above which published-spread delays ranks."""
    published_delay: float = number(0.8, 0.0, 2.0)
    """Share of its wait by which the published rule delays a rank; the paper does not state it."""
    gc_steps: int = number(0, 0, 100_000)
    """Steps between two garbage collections under coschedule; 0: as often as Python collected on its own."""
    stagger_slots: int = number(0, 0, 64)
    """Jobs that take turns on a link under stagger; 0: the ranks of this job take turns."""
    stagger_slot: int = number(0, 0, 63)
    """Turn of this job, from 0."""
    stagger_period_ms: float = number(0.0, 0.0, 1e6)
    """Time in which every job has one turn: the same in all jobs, and at least their longest step."""
    timeout_s: float = number(30.0, 1.0, 3600.0)
    """Seconds after which an exchange is given up, and pacing with it; the job goes on."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of bounds, and those of settings that depend on each other."""
        yield from super().checks()
        yield self._check_policy
        yield self._check_blocks
        yield self._check_stagger

    def _check_policy(self) -> None:
        if self.policy not in (NO_POLICY, *POLICIES):
            raise self.wrong("policy", f"one of none, {', '.join(POLICIES)}")

    def _check_blocks(self) -> None:
        if self.window_steps and self.block_steps % self.window_steps:
            raise self.wrong("block_steps", f"a multiple of window_steps, {self.window_steps}")
        if self.dropped_steps > self.block_steps // 2:
            raise self.wrong("dropped_steps", f"at most half of a block, {self.block_steps // 2}")
        if self.share_low > self.share_high:
            raise self.wrong("share_low", f"at most share_high, {self.share_high}")

    def _check_stagger(self) -> None:
        if self.stagger_slots and self.stagger_slot >= self.stagger_slots:
            raise self.wrong("stagger_slot", f"from 0 to {self.stagger_slots - 1}")
        if self.stagger_slots and self.stagger_period_ms <= 0:
            raise self.wrong("stagger_period_ms", "above 0 with slots")

    @property
    def is_on(self) -> bool:
        """Whether the job is paced."""
        return self.policy != NO_POLICY

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
    def guard_ns(self) -> float:
        """The fixed part of the guard in nanoseconds."""
        return self.guard_us * NS_PER_US

    @property
    def stagger_period_ns(self) -> int:
        """The period of the jobs' turns in nanoseconds."""
        return round(self.stagger_period_ms * NS_PER_MS)
