"""What pacing could gain at most where it only observes: on devices, from how long ranks wait for each other there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcpace.diagnosis.modes.finding import Panels
from hpcpace.diagnosis.summary import PacingFigures
from hpcpace.metrics.phases import EXPOSED_WAIT, share_of


def with_slack(pacing: PacingFigures | None, panels: Panels, *, are_waits_known: bool) -> PacingFigures | None:
    """Return the outcome of pacing with the slack of the ranks, where it waits on devices and their times are known.

    The slack of a rank in a step is its exposed wait less that of the rank that waits least there. To remove all waits
    gains the share of exposed wait at most, which the report shows as such.

    Args:
        pacing: from trial.json; None where the run was not paced.
        panels: the steps.
        are_waits_known: whether waits are told from transfers.
    """
    if pacing is None or not pacing.waits_on_device or panels.host_timed or panels.parts_ns is None:
        return pacing
    if not are_waits_known:
        return pacing
    slack_ns = (panels.wait_ns - panels.wait_ns.min(axis=0)).mean(axis=1)
    most = int(np.argmax(slack_ns))
    return replace(
        pacing,
        slack_ns=float(slack_ns.mean()),
        most_slack_ns=float(slack_ns[most]),
        most_slack_rank=int(panels.rank[most]),
        most_gain=share_of(panels.parts_ns, EXPOSED_WAIT),
    )
