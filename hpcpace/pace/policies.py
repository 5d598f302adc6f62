"""The policies that delay ranks: slack, the published rule in two readings, taking turns.

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

from hpcpace.pace.controller import Controller, Measurement, UsualPattern
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm

_NUM_STEPS_OF_MEDIAN = 64
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
