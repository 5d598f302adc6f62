"""Bandwidths of a page are those of the frame of operations, and rest on clocks that can be believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hpcpace
from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.plot_source import bandwidths, clock_errors_ns, plot_data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("run") / "run"
    SyntheticRun(hosts=("n0", "n1"), noise=0.05, halfwidth_ns=10).write(path)
    return hpcpace.load(path, warns=False)


def with_transfers(measured, **changes):
    (group,) = (one for one in measured.operations.transfers if one.op == "all_reduce")
    figures = replace(measured.operations, transfers=(replace(group, **changes),))
    return replace(measured, operations=figures)


def test_the_median_is_that_of_the_frame(run) -> None:
    frame = run.collectives.query("op == 'all_reduce' and rank == 0")
    found = {(one.op, one.group_size, one.size_bytes): one for one in bandwidths(run.judged.measured)}
    assert found
    for kind, rows in frame.groupby(["op", "group_size", "size_bytes"], observed=True):
        ours = found[kind]
        assert ours.median == pytest.approx(rows.algorithm_bytes_per_s.median())
        assert ours.bus_factor == pytest.approx((rows.bus_bytes_per_s / rows.algorithm_bytes_per_s).median())


def test_transfers_within_the_error_of_clocks_are_left_out(run) -> None:
    measured = run.judged.measured
    error_ns = 2 * clock_errors_ns(measured).max()
    transfer_ns = np.array([error_ns, error_ns / 2, np.nan])
    assert not bandwidths(with_transfers(measured, transfer_ns=transfer_ns))
    (one,) = bandwidths(with_transfers(measured, transfer_ns=np.append(transfer_ns, 4 * error_ns), size_bytes=8))
    assert one.low == one.high == pytest.approx(8e9 / (4 * error_ns))


def test_no_clock_is_needed_on_one_host(run) -> None:
    measured = run.judged.measured
    ranks = [trace.header.rank for trace in measured.timed.traces if trace.header.node == 0]
    (one,) = bandwidths(with_transfers(measured, members=tuple(ranks), transfer_ns=np.ones(3), size_bytes=8))
    assert one.median == pytest.approx(8e9) and one.group_size == len(ranks)


@pytest.mark.parametrize("changes", [{"size_bytes": 0}, {"members": (0,)}])
def test_what_passes_nothing_has_no_bandwidth(run, changes) -> None:
    assert not bandwidths(with_transfers(run.judged.measured, **changes))


def test_an_unknown_operation_has_no_bus_bandwidth(run) -> None:
    (one,) = bandwidths(with_transfers(run.judged.measured, op="op 99"))
    assert one.bus_factor is None


def test_parts_of_a_page_are_those_of_the_frame(run) -> None:
    drawn = plot_data(run.judged, None).parts_ms
    assert drawn is not None
    mean = run.parts.groupby("step").forward_ns.mean() / 1e6
    assert drawn["forward"] == pytest.approx(mean.to_numpy())
