"""How long a step takes at least with a host, from marks of steps that are alike."""

import numpy as np
import pytest

from hpcpace.metrics.host_waits import HostPaceThresholds, Stretches
from hpcpace.metrics.issue_leads import Issued, StepPace, cut_at_operations, step_pace
from hpcpace.metrics.phases import CoveredTime

MS, NUM_STEPS, PERIOD = 1_000_000, 8, 12


def paced(host: list[float], device: list[float], holds: list[tuple[float, float]], since: float = PERIOD) -> StepPace:
    """Return the pace of equal steps, from milliseconds of marks and holds of the device after the begin of each."""
    begin = PERIOD * np.arange(-2, NUM_STEPS + 2)[:, None]
    host_ns, device_ns, holds_ns = (
        ((np.array([of]).reshape(1, -1) + begin) * MS).astype(np.int64) for of in (host, device, holds)
    )
    held = CoveredTime(begin_ns=holds_ns[:, ::2].ravel(), end_ns=holds_ns[:, 1::2].ravel())
    since_ns = np.full(host_ns.shape, int(since * MS))
    return step_pace(host_ns[2:-2], device_ns[2:-2], held, since_ns[2:-2], HostPaceThresholds())


def test_a_host_ahead_of_a_device_that_others_hold_lets_the_step_be_as_short_as_it_issues():
    found = paced([0, 4, 8], [6, 12, 18], [(9, 12), (15, 18)])
    assert (found.least_ns, found.issue_ns, found.sure_ns) == pytest.approx((8 * MS, 8 * MS, 6 * MS))


def test_a_host_that_goes_on_when_its_device_does_may_be_held_up_at_its_pace():
    found = paced([0, 6, 12], [6, 12, 18], [(9, 12), (15, 18)])
    assert (found.least_ns, found.possible_ns) == pytest.approx((0, 6 * MS))


def test_a_host_is_as_slow_as_it_issues_before_its_queue_is_full():
    """It issues for 8 ms what takes its device 6 ms, which others hold for as long."""
    found = paced([0, 4, 8, 12], [12, 15, 18, 24], [(6, 12)])
    assert (found.least_ns, found.possible_ns) == pytest.approx((8 * MS, 8 * MS))


def test_a_host_that_is_far_ahead_and_as_slow_as_the_step_may_be_held_up():
    assert paced([0, 6, 12], [6, 12, 18], []).least_ns == 0


def test_a_host_that_issues_longer_steps_of_later_on_may_be_held_up():
    """Each step takes 1.5 % longer than the one before; the launch queue holds two of them."""
    ends_ns = np.cumsum(10 * MS * 1.015 ** np.arange(40)).astype(np.int64)
    marks_ns = np.linspace(np.append(0, ends_ns[:-1]), ends_ns, 3, axis=1).astype(np.int64)
    nothing = np.zeros(0, np.int64)
    held, since_ns = CoveredTime(begin_ns=nothing, end_ns=nothing), np.full_like(marks_ns[2:], 50 * MS)
    assert step_pace(marks_ns[:-2], marks_ns[2:], held, since_ns, HostPaceThresholds()).least_ns == 0


def test_a_host_that_is_as_slow_as_the_step_right_before_its_device_paces_it():
    found = paced([0, 6, 12], [0, 6.5, 12.5], [])
    assert found.least_ns == pytest.approx(PERIOD * MS, rel=0.05)
    assert found.sure_ns < found.most_ns


def test_a_host_that_reads_the_loss_issues_the_next_step_after_what_is_left():
    """Others held its device for 3 ms; after 2 ms of issuing, 8 ms of work are left, for which the host waits."""
    found = paced([0, 2, 4, 12], [0, 6, 9, 12], [(3, 6)])
    assert (found.least_ns, found.issue_ns, found.waiting_ns) == pytest.approx((8 * MS, 12 * MS, 8 * MS))


@pytest.mark.parametrize("rounded_ns", [-128, 0, 128])
def test_what_is_issued_at_a_mark_counts_before_it_to_whichever_side_it_was_rounded(rounded_ns):
    begin, nothing, no = np.arange(2) * 10 * MS, np.zeros(2, np.int64), np.zeros(2, np.bool_)
    stretches = Stretches(
        step=np.arange(2), phase=nothing, piece=nothing, begin_ns=begin, end_ns=begin + 8 * MS, is_dry_before=no,
        is_dry_after=no, collected_ns=nothing, host_ns=nothing + 8 * MS, lead_before_ns=nothing, lead_after_ns=nothing,
    )  # fmt: skip
    issue_ns = np.sort(np.concatenate([begin, begin + 8 * MS])) + rounded_ns
    issued = Issued(issue_ns=issue_ns, enter_ns=issue_ns, exit_ns=issue_ns, blocked_ns=np.zeros(4, np.int64))
    rows, columns = cut_at_operations(stretches, issued)
    assert (rows.tolist(), columns.shape[2]) == ([0, 1], 2)
    assert columns[2].tolist() == pytest.approx(np.array([[8 * MS, 0]] * 2), abs=200)
