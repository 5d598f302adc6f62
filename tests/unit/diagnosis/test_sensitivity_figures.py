from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.figures.causes import sensitivity_figures
from hpcpace.diagnosis.measure import Selection, measure
from hpcpace.diagnosis.summary import SensitivityRow
from hpcpace.report.sections.communication import skew_reading
from hpcpace.trace.attempt_reader import read_attempt

ROW = SensitivityRow(op="all_reduce", group_size=4, size_bytes=4096, slope=0.0, interval=(0.0, 0.0), num_operations=40)


def measured_of(path, **settings):
    run = SyntheticRun(**settings).write(path)
    return measure(read_attempt(run.attempts()[-1]).traces, Selection())


def test_transfers_that_do_not_depend_on_skew_have_no_slope(tmp_path):
    (row,) = sensitivity_figures(measured_of(tmp_path / "run", noise=0.05))
    assert (row.op, row.group_size, row.size_bytes, row.num_operations) == ("all_reduce", 4, 4096, 38)
    assert row.interval[0] <= row.slope <= row.interval[1]
    assert abs(row.slope) < 1e-3


def test_transfers_that_take_longer_together_have_a_negative_slope(tmp_path):
    measured = measured_of(tmp_path / "run", noise=0.05, num_steps=60)
    close_up = measured.close_up
    evidence = close_up.evidence
    done, matching, waits = (getattr(evidence, name) for name in ("operations", "matching", "waits"))
    enter_ns = done.enter_ns[matching.order].reshape(-1, 4)
    # Half a nanosecond less of transfer for each one that lies between the first rank and the last.
    less_ns = (0.5 * (enter_ns.max(axis=1) - enter_ns.min(axis=1))).astype(np.int64)
    longer = replace(waits, transfer_ns=waits.transfer_ns + int(1e8) - less_ns[matching.instance])
    measured.__dict__["close_up"] = replace(close_up, evidence=replace(evidence, waits=longer))
    (row,) = sensitivity_figures(measured)
    assert row.slope == pytest.approx(-0.5, abs=0.1)
    assert row.interval[1] < 0


def test_a_skew_within_the_clocks_error_tells_nothing(tmp_path):
    measured = measured_of(tmp_path / "run", noise=0.05, hosts=("n1", "n2"), halfwidth_ns=50_000_000)
    assert sensitivity_figures(measured) == ()


def test_one_rank_has_no_skew(tmp_path):
    assert sensitivity_figures(measured_of(tmp_path / "run", num_ranks=1, num_steps=5)) == ()


@each_case(
    ("interval", "reading"),
    [
        ((-0.6, -0.4), "longer when together: contention"),
        ((0.1, 0.4), "longer when apart"),
        ((-0.1, 0.4), "no dependence seen"),
        ((-0.01, -0.001), "small"),
    ],
)
def test_a_slope_is_read_by_its_interval(interval, reading):
    assert skew_reading(replace(ROW, interval=interval)) == reading
