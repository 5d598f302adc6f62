"""The laws that turn slack into a delay, the published ones too: pure state machines, measurements in, delay out.

A rank has slack if it is ready before the critical rank, the last one to arrive at the pacing point; a delay shorter
than its slack costs nothing. The law uses less than the slack (a share of the lower quartile, or of the median where
steps have become shorter, minus a guard), even less in a step in which the rank is late, measures what it costs (harm),
and gives up if it costs anything. Measurements that cannot be trusted mean no delay.

The published rule is that of Gopalan and Ali, "When Scaling Fails" (arXiv 2603.04424), which delays early ranks by a
bounded time. The paper leaves open which quantity triggers the delay and how long it is: both readings are here as
written, with the length as a setting. Neither measures what it costs; the trial does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm

# A wait longer than this is a hang or a broken clock, not a reason to delay a rank.
_MAX_NS = 3_600e9


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The pacing point in a window of consecutive steps; sequences are (num_steps,), times in nanoseconds.

    Attributes:
        own_ns: exit - ready of this rank; NaN if missing.
        least_ns: its minimum over the ranks that meet at the point.
        most_ns: its maximum.
        step_ns: duration of the step on rank 0; NaN where it does not count (checkpoint, evaluation).
        work_ns: from this rank's release in the step before until it was ready; NaN if unknown.
        delayed_ns: delay of this rank.
        overshoot_ns: how much too long each sleep was, (num_sleeps,).
        arm: whether the ranks were paced.
    """

    own_ns: tuple[float, ...]
    least_ns: tuple[float, ...]
    most_ns: tuple[float, ...]
    work_ns: tuple[float, ...]
    step_ns: tuple[float, ...]
    delayed_ns: tuple[float, ...] = ()
    overshoot_ns: tuple[float, ...] = ()
    arm: PaceArm = PaceArm.ON

    @property
    def slack_ns(self) -> tuple[float, ...]:
        """How far this rank was ahead of the critical rank, whose slack is 0: (exit - ready) - minimum."""
        return tuple(own - least for own, least in zip(self.own_ns, self.least_ns, strict=True))

    @property
    def is_usable(self) -> bool:
        """Whether the measurement can be trusted: nothing is missing, too long, or contradicts itself."""
        columns = (self.own_ns, self.least_ns, self.most_ns, self.step_ns, self.work_ns)
        own, least, most, steps, works = (np.asarray(column, dtype=float) for column in columns)
        late = np.array([*self.delayed_ns, *self.overshoot_ns])
        if not own.size or len({column.shape for column in (own, least, most, steps, works)}) > 1:
            return False
        waits_fit = (least >= 0) & (least <= own) & (own <= most) & (most <= _MAX_NS)
        are_wrong = [(column < 0) | np.isinf(column) for column in (steps, works)]
        return bool(waits_fit.all() and not np.any(are_wrong) and ((late >= 0) & (late <= _MAX_NS)).all())


_NUM_SLACKS = 16
_QUANTILE = 0.25
_QUANTILE_OF_GAIN = 0.5
_NUM_STEPS_OF_MEDIAN = 64
_NUM_OFF_STEPS = 256
_NUM_ON_STEPS = 32
_NUM_WORKS = 32
_MIN_STEPS = 8
_HARM_STANDARD_ERRORS = 3.0
_HARM_SHARE = 0.005
_NO_HARM_STANDARD_ERRORS = 2.0
_GAIN_STANDARD_ERRORS = 3.0
_INCREASE = 0.05
_NUM_HALVINGS = 3
_FIRST_PAUSE = 8
_MAX_PAUSE = 512
_NUM_WINDOWS_LATE = 2
# Variance of a median over that of a mean, of normal values.
_MEDIAN_VARIANCE = math.pi / 2


class _Past:
    """The measurements of the last steps of one kind, paced or unpaced.

    Attributes:
        works_ns: from this rank's release until it was ready again; NaN if unknown.
        slacks_ns: how far it was ahead of the critical rank then.
        least_ns: exit - ready of the critical rank.
        steps_ns: durations of the steps.
    """

    def __init__(self, num_steps: int) -> None:
        self.works_ns: deque[float] = deque(maxlen=_NUM_WORKS)
        self.slacks_ns: deque[float] = deque(maxlen=_NUM_WORKS)
        self.least_ns: deque[float] = deque(maxlen=num_steps)
        self.steps_ns: deque[float] = deque(maxlen=num_steps)

    def clear(self) -> None:
        for values in (self.works_ns, self.slacks_ns, self.least_ns, self.steps_ns):
            values.clear()


@dataclass(frozen=True)
class UsualPattern:
    """The usual work of a rank, and how its slack depends on its work, from its last steps.

    Attributes:
        work_ns: median of its work; NaN while unknown, inf where being late does not matter.
        own_share: slack lost for each nanosecond that the rank is late, from 0 where all ranks are late together to 1
            where it is late by itself. Least squares.
        slacks_ns: the slacks that it would have had in the last steps if its work had been as usual.
    """

    work_ns: float = math.nan
    own_share: float = 1.0
    slacks_ns: tuple[float, ...] = ()

    @classmethod
    def of(cls, past: _Past) -> UsualPattern:
        """Return the pattern of these steps."""
        works_ns, slacks_ns = np.array(past.works_ns), np.array(past.slacks_ns)
        known = ~np.isnan(works_ns)
        if known.sum() < _MIN_STEPS:
            return cls(slacks_ns=tuple(slacks_ns[-_NUM_SLACKS:]))
        usual_ns = float(np.median(works_ns[known]))
        (variance, covariance), _ = np.cov(works_ns[known], slacks_ns[known])
        own_share = float(np.clip(-covariance / variance, 0.0, 1.0)) if variance > 0 else 1.0
        usual_slacks_ns = slacks_ns + np.where(known, own_share * (works_ns - usual_ns), 0.0)
        return cls(work_ns=usual_ns, own_share=own_share, slacks_ns=tuple(usual_slacks_ns[-_NUM_SLACKS:]))

    def delay_ns(self, base_ns: float, work_ns: float) -> float:
        """Return the part of a delay that remains after this work; 0 where nobody knows whether the rank is late."""
        late_ns = work_ns - self.work_ns
        return 0.0 if math.isnan(late_ns) else max(base_ns - self.own_share * max(late_ns, 0.0), 0.0)


class Controller:
    """Decides on the delay of one rank after each window, and shortens it in a step in which the rank is late.

        late  = own_share * (work - usual work)
        base  = clip(share * quantile(last 16 of slack + late) - guard, 0, bound)
        delay = max(base - max(late, 0), 0)

    Work is the time from a rank's release until it is ready again; the usual work is its median. Slack + late is the
    slack that the rank would have had on its usual schedule. The own share separates ranks that are late alone from
    ranks that are late together and lose no slack. Where ranks share cores and poll while they wait, delays of other
    ranks change work and slack, so paced and unpaced steps are kept apart. The base moves halfway to its target in each
    window.

    The share grows by 0.05 with each window without harm, from `share_low` to `share_high`; harm halves it, and after
    three halvings in a row the delay is zero for a while, twice as long each time. All ranks of a group see the same
    harm, so they halve together.

    If a different rank is critical in each step, that rank may be delayed, and its delay is harm. It does not count as
    harm if the whole step becomes shorter by more than its noise: ranks that poll on shared cores gain more than it
    costs. If that is beyond doubt the quantile is the median, otherwise the lower quartile.

    Attributes:
        delay_ns: the base, what `update` returned last.
        usual: how the slack depends on the work.
        harm_ns: mean of the critical rank's exit - ready while paced, less its median while not: what pacing costs
            each step; 0 while unknown.
        is_harmful: whether the last update found harm above its noise.
        num_harms: how often it did.
    """

    def __init__(self, settings: PaceSettings) -> None:
        self._settings = settings
        self.num_harms = 0
        self._pause = _FIRST_PAUSE
        self.reset()

    def reset(self) -> None:
        """Forget everything: a different world or different shapes are a different problem."""
        self.delay_ns = 0
        self.harm_ns = 0
        self.is_harmful = False
        self._share = self._settings.share_low
        self._steps_ns: deque[float] = deque(maxlen=_NUM_STEPS_OF_MEDIAN)
        self._overshoots_ns: deque[float] = deque(maxlen=_NUM_STEPS_OF_MEDIAN)
        self._off, self._on = _Past(_NUM_OFF_STEPS), _Past(_NUM_ON_STEPS)
        self.usual = UsualPattern()
        self._num_steps_above = 0
        self._is_engaged = False
        self._num_paused = self._num_rested = 0

    def update(self, measurement: Measurement) -> int:
        """Take a window of steps; return this rank's delay in the next steps, in nanoseconds.

        Never raises: if a window cannot be trusted, the delay is zero and the history starts afresh.
        """
        try:
            is_usable = measurement.is_usable
            if is_usable:
                self._note(measurement)
                self._judge(measurement.arm)
                self.delay_ns = self._decide(len(measurement.own_ns))
        except Exception:  # the boundary of a law that must not cost a job anything
            is_usable = False
        if not is_usable:
            self.delay_ns = 0
            self._off.works_ns.clear()
            self._off.slacks_ns.clear()
            self._on.clear()
            self._is_engaged, self._num_steps_above = False, 0
        return self.delay_ns

    def delay_at(self, unix_ns: int, work_ns: float) -> int:
        """Return the delay of a rank that is ready, in nanoseconds; 0 if nobody knows whether it is late.

        Args:
            unix_ns: the time of day; not used here.
            work_ns: from its release in the step before until now; NaN if unknown.
        """
        return round(self.usual.delay_ns(self.delay_ns, work_ns))

    @property
    def bound_ns(self) -> float:
        """The longest delay allowed; 0 while the duration of a step is unknown."""
        return self._settings.max_delay_share * self._median_step_ns()

    def _note(self, measurement: Measurement) -> None:
        # A pause ends on all ranks at once; no rank is delayed in it once the windows in flight at its start are over.
        is_free = measurement.arm != PaceArm.ON or self._num_rested >= _NUM_WINDOWS_LATE
        past = self._off if is_free else self._on
        self._overshoots_ns.extend(measurement.overshoot_ns)
        steps_ns = [time_ns for time_ns in measurement.step_ns if not math.isnan(time_ns)]
        self._steps_ns.extend(steps_ns)
        past.steps_ns.extend(steps_ns)
        past.least_ns.extend(measurement.least_ns)
        past.works_ns.extend(measurement.work_ns)
        past.slacks_ns.extend(measurement.slack_ns)

    def _median_step_ns(self) -> float:
        return float(np.median(self._steps_ns)) if self._steps_ns else 0.0

    def _judge(self, arm: PaceArm) -> None:
        """Look for harm, and adapt the share."""
        self.is_harmful = False
        if self._num_paused:
            self._num_paused -= 1
            self._num_rested = self._num_rested + 1 if self._num_paused else 0
            self._on.clear()
        if arm != PaceArm.ON or self._num_paused:
            return
        num_on, num_off = len(self._on.least_ns), len(self._off.least_ns)
        if num_on < _MIN_STEPS or num_off < _MIN_STEPS:
            return
        on_ns, off_ns = np.array(self._on.least_ns), np.array(self._off.least_ns)
        harm_ns = float(on_ns.mean() - np.median(off_ns))
        error_ns = math.sqrt(on_ns.var(ddof=1) / num_on + _MEDIAN_VARIANCE * off_ns.var(ddof=1) / num_off)
        self.harm_ns = round(harm_ns)
        is_above = harm_ns > max(_HARM_STANDARD_ERRORS * error_ns, _HARM_SHARE * self._median_step_ns())
        if is_above and not self._is_step_shorter(_NO_HARM_STANDARD_ERRORS):
            self.is_harmful = True
            self.num_harms += 1
            self._back_off()
        else:
            self._share = min(self._share + _INCREASE, self._settings.share_high)

    def _is_step_shorter(self, standard_errors: float) -> bool:
        """Whether paced steps are shorter than unpaced ones by more than so many standard errors."""
        num_on, num_off = len(self._on.steps_ns), len(self._off.steps_ns)
        if num_on < _MIN_STEPS or num_off < _MIN_STEPS:
            return False
        on_ns, off_ns = np.array(self._on.steps_ns), np.array(self._off.steps_ns)
        error_ns = math.sqrt(on_ns.var(ddof=1) / num_on + off_ns.var(ddof=1) / num_off)
        return bool(off_ns.mean() - on_ns.mean() > standard_errors * error_ns)

    def _back_off(self) -> None:
        self._share /= 2
        self._on.clear()
        if self._share <= self._settings.share_low / 2**_NUM_HALVINGS:
            self._num_paused, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
            self._share = self._settings.share_low

    def _decide(self, num_steps: int) -> int:
        settings, median_ns = self._settings, self._median_step_ns()
        self.usual = UsualPattern.of(self._on if len(self._on.slacks_ns) >= _NUM_SLACKS else self._off)
        slacks_ns = self.usual.slacks_ns
        if self._num_paused or len(slacks_ns) < _NUM_SLACKS or not median_ns:
            self._is_engaged, self._num_steps_above = False, 0
            return 0
        guard_ns = settings.guard_ns
        if self._overshoots_ns:
            guard_ns += settings.guard_overshoots * float(np.quantile(self._overshoots_ns, 0.99))
        quantile = _QUANTILE_OF_GAIN if self._is_step_shorter(_GAIN_STANDARD_ERRORS) else _QUANTILE
        wanted_ns = self._share * float(np.quantile(slacks_ns, quantile)) - guard_ns
        threshold_ns = settings.engage_share * median_ns
        self._num_steps_above = self._num_steps_above + num_steps if wanted_ns >= threshold_ns else 0
        if self._is_engaged:
            self._is_engaged = wanted_ns >= threshold_ns / 2
        else:
            self._is_engaged = self._num_steps_above >= settings.engage_steps
        if not self._is_engaged:
            return 0
        # When ranks sleep instead of polling, the others get faster and leave less slack: moving halfway to the target
        # converges, moving all the way swings between no delay and one that is too long.
        wanted_ns = min(max(wanted_ns, 0.0), self.bound_ns)
        if self.delay_ns:
            wanted_ns = min((self.delay_ns + wanted_ns) / 2, self.bound_ns)
        return int(wanted_ns)


_LATE_OR_NOT = UsualPattern(work_ns=math.inf)


class Policy(Protocol):
    """Decides on the delay of one rank. No method raises; measurements that cannot be trusted give a delay of zero.

    Attributes:
        usual: how `delay_at` shortens the delay of a late rank.
    """

    usual: UsualPattern

    @property
    def harm_ns(self) -> int:
        """The last measured cost of pacing in each step; 0 if the policy does not measure it."""

    def reset(self) -> None:
        """Forget everything, after a change of shapes."""

    def update(self, measurement: Measurement) -> int:
        """Take a window of steps; return the delay for the next steps, in nanoseconds."""

    def delay_at(self, unix_ns: int, work_ns: float) -> int:
        """Return the delay of a rank that is ready, in nanoseconds.

        Args:
            unix_ns: the time of day.
            work_ns: from its release in the step before until now; NaN if unknown.
        """


class Passive:
    """Delays no rank: observe, and coschedule."""

    harm_ns = 0
    usual = _LATE_OR_NOT

    def reset(self) -> None:
        """Do nothing."""

    def update(self, measurement: Measurement) -> int:
        """Return zero."""
        return 0

    def delay_at(self, unix_ns: int, work_ns: float) -> int:
        """Return zero."""
        return 0


class _Bounded(ABC):
    """A policy that looks back on a number of steps; bounded like the controller, and without a delay on errors."""

    harm_ns = 0
    usual = _LATE_OR_NOT

    def __init__(self, settings: PaceSettings) -> None:
        self._settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.delay_ns = 0
        self._values_ns: deque[float] = deque(maxlen=self._settings.published_steps)
        self._own_ns: deque[float] = deque(maxlen=self._settings.published_steps)
        self._steps_ns: deque[float] = deque(maxlen=_NUM_STEPS_OF_MEDIAN)

    def update(self, measurement: Measurement) -> int:
        """Take a window of steps; return the delay for the next steps, in nanoseconds."""
        self.delay_ns = 0
        try:
            if not measurement.is_usable:
                self._values_ns.clear()
                self._own_ns.clear()
                return 0
            self._steps_ns.extend(time_ns for time_ns in measurement.step_ns if not math.isnan(time_ns))
            median_ns = float(np.median(self._steps_ns)) if self._steps_ns else 0.0
            wanted_ns = self._wanted_ns(measurement, median_ns)
            self.delay_ns = int(min(max(wanted_ns, 0.0), self._settings.max_delay_share * median_ns))
        except Exception:  # the boundary of a law that must not cost a job anything
            self.reset()
        return self.delay_ns

    def delay_at(self, unix_ns: int, work_ns: float) -> int:
        """Return the delay decided after the last window."""
        return self.delay_ns

    @abstractmethod
    def _wanted_ns(self, measurement: Measurement, median_ns: float) -> float: ...


class PublishedWindow(_Bounded):
    """First reading: a rank whose own waits have varied by more than a threshold is delayed by a share of them."""

    def _wanted_ns(self, measurement: Measurement, median_ns: float) -> float:
        self._own_ns.extend(measurement.own_ns)
        if len(self._own_ns) < self._settings.published_steps:
            return 0.0
        waits_ns = np.array(self._own_ns)
        mean_ns = float(waits_ns.mean())
        if not mean_ns or waits_ns.std() / mean_ns <= self._settings.published_variation:
            return 0.0
        return self._settings.published_delay * mean_ns


class PublishedSpread(_Bounded):
    """Second reading: while the arrivals are spread wider than a threshold, early ranks are delayed by a share."""

    def _wanted_ns(self, measurement: Measurement, median_ns: float) -> float:
        spreads_ns = (most - least for most, least in zip(measurement.most_ns, measurement.least_ns, strict=True))
        self._values_ns.extend(spreads_ns)
        self._own_ns.extend(measurement.slack_ns)
        if len(self._own_ns) < self._settings.published_steps:
            return 0.0
        if float(np.mean(self._values_ns)) <= self._settings.published_spread * median_ns:
            return 0.0
        return self._settings.published_delay * float(np.mean(self._own_ns))


class StaggeredRanks(_Bounded):
    """The ranks of a group enter one after another, spread over the duration of the operation itself.

    Args:
        index: position of this rank in its group.
        num_members: ranks of the group.
    """

    def __init__(self, settings: PaceSettings, *, index: int, num_members: int) -> None:
        self._turn = index / max(num_members, 1)
        super().__init__(settings)

    def _wanted_ns(self, measurement: Measurement, median_ns: float) -> float:
        # Only while unpaced; otherwise the spread that it causes would count as the operation's own time.
        if measurement.arm != PaceArm.ON:
            self._values_ns.extend(measurement.least_ns)
        return self._turn * float(np.median(self._values_ns)) if self._values_ns else 0.0


class StaggeredJobs(_Bounded):
    """Jobs on one link take turns by the time of day: each enters when its slot of the common period opens.

    If the slot is further away than the bound, each step moves closer by the bound.
    """

    def _wanted_ns(self, measurement: Measurement, median_ns: float) -> float:
        return math.inf if median_ns else 0.0

    def delay_at(self, unix_ns: int, work_ns: float) -> int:
        """Return the time until the slot opens, or the bound; zero if it is open."""
        settings = self._settings
        period_ns = settings.stagger_period_ns
        slot_ns = period_ns // settings.stagger_slots
        since_ns = (unix_ns - settings.stagger_slot * slot_ns) % period_ns
        return 0 if since_ns < slot_ns else min(period_ns - since_ns, self.delay_ns)


def make_policy(name: str, settings: PaceSettings, *, index: int = 0, num_members: int = 1) -> Policy:
    """Return a policy by its name in the settings.

    Args:
        name: one of `hpcpace.pace.settings.POLICIES`, except auto, which chooses one of the others.
        settings: its parameters.
        index: position of this rank among those that it meets.
        num_members: number of these ranks.
    """
    if name == "slack":
        return Controller(settings)
    if name == "published-window":
        return PublishedWindow(settings)
    if name == "published-spread":
        return PublishedSpread(settings)
    if name == "stagger":
        if settings.stagger_slots:
            return StaggeredJobs(settings)
        return StaggeredRanks(settings, index=index, num_members=num_members)
    return Passive()
