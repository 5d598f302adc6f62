"""Adds what a rank saw when a step lasted too long to what its trace shows: where its threads are, what it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcpace.hang.notices import Notice
from hpcpace.hang.views import Doing, RankView
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.trace.plausible import MOST_NS


def with_notice(view: RankView, notice: Notice, clock: CommonClock, at_ns: int) -> RankView:
    """Return what is known of a rank with the stack of its training thread, and what it does.

    Args:
        view: from its trace, as of `at_ns`.
        notice: what it wrote; it counts from its first look until its step has ended.
        clock: that of the rank, with which the notice was written, too.
        at_ns: time of the look at the job.
    """
    times_ns = (notice.first_time_ns, notice.ended_ns, notice.doing_since_ns)
    if view.is_gone or max(map(abs, times_ns)) > MOST_NS:
        return view
    first_ns, ended_ns, since_ns = reference_times(clock, np.array(times_ns, np.int64)).tolist()
    if first_ns > at_ns or (notice.ended and ended_ns <= at_ns):
        return view
    view = replace(view, stack=notice.stack)
    if notice.doing is Doing.UNKNOWN:
        return view
    is_known = notice.doing_since_ns > 0 and since_ns <= at_ns
    return replace(view, doing=notice.doing, doing_since_ns=since_ns if is_known else view.doing_since_ns)
