"""Pacing that only observes on devices: the slack of the ranks there, and what a trial could gain at most."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_sample import print_report
from rich.console import Console

from hpcpace.core.rundir import write_json
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.pace.pacer import PacingRecord
from hpcpace.trace.attempt_reader import read_attempt
from tests.device_run import MS, DeviceRun

SLOW = {2: 1.3}
WORK_MS = 33
"""Of forward, backward and optimizer on a device, as in `tests.device_run.STEP`."""


def summarized(path: Path, *, waits_on_device: bool = True, **settings: object) -> Summary:
    run = DeviceRun(slow=SLOW, **settings).write(path)
    attempt = run.last_attempt()
    record = PacingRecord(policy="slack", reason="collectives run on GPUs: observed only")
    record.facts = {"waits_on_device": waits_on_device}
    write_json(attempt.trial_json, record.to_json())
    return analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary


def terminal(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(console, summary)
    return console.file.getvalue()


def test_the_slack_on_devices_is_that_of_the_slow_rank_and_no_gain_exceeds_the_exposed_wait(tmp_path):
    summary = summarized(tmp_path / "run", has_device_times=True, num_buckets=1)
    pacing = summary.pacing
    # Three of four ranks wait in each step for what rank 2 takes longer from one exchange of gradients to the next.
    longer_ns = 0.3 * WORK_MS * MS
    assert pacing.most_slack_ns == pytest.approx(longer_ns, rel=0.05)
    assert pacing.slack_ns == pytest.approx(0.75 * longer_ns, rel=0.05)
    assert pacing.most_slack_rank != 2
    assert pacing.most_gain == summary.shares.exposed_wait
    assert f"at most {100 * summary.shares.exposed_wait:.1f} % of the step time" in terminal(summary)


def test_without_device_times_slack_is_not_known(tmp_path):
    summary = summarized(tmp_path / "run", has_device_times=False)
    assert summary.pacing.waits_on_device
    assert (summary.pacing.slack_ns, summary.pacing.most_gain) == (None, None)
    assert "slack" in (text := terminal(summary))
    assert "not known: phases are host times of ranks with a device" in text


def test_where_ranks_can_be_delayed_the_trial_says_what_there_is_to_gain(tmp_path):
    summary = summarized(tmp_path / "run", waits_on_device=False, has_device_times=True)
    assert summary.pacing.slack_ns is None
    assert "on its device" not in terminal(summary)
