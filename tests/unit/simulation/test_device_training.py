"""What the trace of a simulated job says of its devices is what they did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulated_device import DeviceClock, HostCosts
from simulated_training import DeviceJob, DeviceStep, write_device_traces

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind, Phase

NUM_STEPS = 30
# Marks and anchors have errors of some microseconds.
ERROR_NS = 8_000

DEVICE_BOUND = DeviceStep()
LAUNCH_BOUND = DeviceStep(kernel_ns=4_000, num_forward=200, num_backward=400, num_optimizer=50, transfer_ns=20_000)
SYNCHRONISED = DeviceStep(reads_loss=True)
SLOW_LOADER = DeviceStep(data_ns=60_000_000)
WAITS_ITSELF = DeviceStep(waits_itself=True)
OVERLAPPING = DeviceStep(num_buckets=10, transfer_ns=300_000, waits_itself=True)
MIXED = DeviceStep(kernel_ns=12_000, num_forward=100, num_backward=200, reads_loss=True, transfer_ns=100_000)


def slow(step: DeviceStep):
    """Return the same step for all ranks but rank 1, whose kernels take 30 % longer."""

    def step_of(rank: int, _: int) -> DeviceStep:
        return DeviceStep(**{**vars(step), "kernel_ns": step.kernel_ns * 13 // 10}) if rank == 1 else step

    return step_of


def late(step: DeviceStep):
    """Return the same step for all ranks but rank 1, whose host comes late with the batch in every third step."""

    def step_of(rank: int, number: int) -> DeviceStep:
        return DeviceStep(**{**vars(step), "data_ns": 25_000_000}) if rank == 1 and number % 3 == 0 else step

    return step_of


JOBS = {
    "device-bound": lambda *_: DEVICE_BOUND,
    "launch-bound": lambda *_: LAUNCH_BOUND,
    "synchronised": lambda *_: SYNCHRONISED,
    "slow loader": lambda *_: SLOW_LOADER,
    "waits itself": lambda *_: WAITS_ITSELF,
    "overlapping": lambda *_: OVERLAPPING,
    "mixed": lambda *_: MIXED,
    "slow device": slow(WAITS_ITSELF),
    "slow device, synchronised": slow(SYNCHRONISED),
    "late host": late(WAITS_ITSELF),
}


@pytest.fixture(scope="module", params=JOBS.values(), ids=list(JOBS))
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The truth and the trace of each rank of a job."""
    folder = tmp_path_factory.mktemp("device")
    job = DeviceJob(
        num_ranks=3,
        num_steps=NUM_STEPS,
        step_of=request.param,
        clock_of=lambda rank: DeviceClock(rate_ppm=20.0 * rank - 10.0, drift_ppm_per_s=0.01, offset_ns=rank << 40),
    )
    truth = write_device_traces(folder, job)
    return list(zip(truth, _traces(folder, 3), strict=True))


def _traces(folder: Path, num_ranks: int):
    traces = [read_trace(folder / f"rank-{rank:05d}.h5") for rank in range(num_ranks)]
    assert all(trace.problems == () and trace.closed_cleanly for trace in traces)
    return traces


def _phase(trace, phase: Phase):
    """The rows of a phase, one a step."""
    rows = trace.tables["phases"]
    return rows.select(rows["phase"] == phase)


def _spent_ns(rows):
    return rows["device_end_ns"] - rows["device_begin_ns"]


def test_every_mark_has_its_time_on_the_device(observed):
    for _, trace in observed:
        for name in ("steps", "phases"):
            rows = trace.tables[name]
            assert (rows["device_begin_ns"] > 0).all() and (rows["device_end_ns"] > 0).all()
            assert (rows["device_begin_ns"] - rows["begin_ns"] > -ERROR_NS).all()


def test_steps_hold_what_the_device_did_and_when_it_had_nothing_to_do(observed):
    for truth, trace in observed:
        steps = trace.tables["steps"]
        spent_ns = steps["device_end_ns"][-1] - steps["device_begin_ns"][0]
        expected_ns = truth.own_ns.sum() + truth.held_ns.sum() + truth.idle_ns.sum()
        assert spent_ns == pytest.approx(expected_ns, rel=0.01)


def test_phases_without_idle_time_hold_their_kernels_within_one_percent(observed):
    for truth, trace in observed:
        for phase in (Phase.FORWARD, Phase.OPTIMIZER):
            is_full = truth.idle_ns[:, phase] == 0
            found_ns, own_ns = _spent_ns(_phase(trace, phase))[is_full], truth.own_ns[is_full, phase]
            assert (np.abs(found_ns - own_ns) <= 0.01 * own_ns + 1_000).all()


def test_own_work_of_backward_is_what_is_left_without_its_waits(observed):
    for truth, trace in observed:
        backward_ns, sync_ns = (_spent_ns(_phase(trace, phase)) for phase in (Phase.BACKWARD, Phase.GRAD_SYNC))
        is_full = truth.idle_ns[:, Phase.BACKWARD] == 0
        own_ns, held_ns = truth.own_ns[is_full, Phase.BACKWARD], truth.held_ns[is_full, Phase.GRAD_SYNC]
        assert (np.abs((backward_ns - sync_ns)[is_full] - own_ns) <= 0.01 * own_ns).all()
        assert (np.abs(sync_ns[is_full] - held_ns) <= 0.01 * held_ns + ERROR_NS).all()


def test_blocked_times_are_those_for_which_the_stream_was_held(observed, request):
    if "waits_itself" not in str(request.node.callspec.id) and not _waits(observed):
        assert all((trace.tables["collectives"]["blocked_ns"] == 0).all() for _, trace in observed)
        return
    for truth, trace in observed:
        rows = trace.tables["collectives"]
        found_ns = np.bincount(rows["step"], rows["blocked_ns"], minlength=NUM_STEPS)
        held_ns = truth.held_ns.sum(axis=1)
        assert np.abs(found_ns - held_ns).max() <= 0.01 * held_ns.max() + ERROR_NS
        assert found_ns.sum() == pytest.approx(held_ns.sum(), rel=0.01)


def _waits(observed) -> bool:
    return any(trace.tables["collectives"]["blocked_ns"].any() for _, trace in observed)


def test_the_lead_of_the_host_is_how_far_the_device_is_behind(observed):
    for truth, trace in observed:
        rows = _phase(trace, Phase.FORWARD)
        lead_ns = rows["device_begin_ns"] - rows["begin_ns"]
        has_run_dry = truth.idle_ns[:, Phase.FORWARD] > 0
        # A device that had run dry passes the mark at once.
        assert (lead_ns[has_run_dry] < 50_000).all()
        true_ns = (truth.first_ns[:, Phase.FORWARD] - rows["begin_ns"])[~has_run_dry]
        assert (np.abs(lead_ns[~has_run_dry] - true_ns) <= 0.01 * true_ns + ERROR_NS).all()


def test_members_leave_an_operation_at_the_same_time(observed):
    exits = np.array([_in_order(trace)["exit_ns"] for _, trace in observed])
    assert np.ptp(exits, axis=0).max() <= 2 * ERROR_NS


def _in_order(trace):
    rows = trace.tables["collectives"]
    return rows.select(np.argsort(rows["seq"]))


def test_a_slow_device_shows_in_its_own_work_and_in_the_waits_of_the_others(tmp_path):
    write_device_traces(tmp_path, DeviceJob(num_ranks=3, num_steps=NUM_STEPS, step_of=slow(WAITS_ITSELF)))
    traces = _traces(tmp_path, 3)
    blocked_ns = [trace.tables["collectives"]["blocked_ns"].sum() for trace in traces]
    own_ns = [_spent_ns(_phase(trace, Phase.FORWARD)).mean() for trace in traces]
    assert own_ns[1] == pytest.approx(1.3 * own_ns[0], rel=0.01)
    assert blocked_ns[1] < 0.2 * min(blocked_ns[0], blocked_ns[2])


def test_a_job_that_is_not_observed_has_host_times_only(tmp_path):
    write_device_traces(
        tmp_path, DeviceJob(num_ranks=2, num_steps=5, step_of=lambda *_: DEVICE_BOUND, is_observed=False)
    )
    for trace in _traces(tmp_path, 2):
        assert "device_begin_ns" not in trace.tables["phases"]
        assert len(trace.tables["phases"]) == 25 and len(trace.tables["collectives"]) == 0


def test_long_jobs_keep_their_device_times_over_many_anchors_and_flushes(tmp_path):
    step = DeviceStep(kernel_ns=5_000_000, num_forward=4, num_backward=4, num_optimizer=1, num_buckets=1)
    job = DeviceJob(
        num_ranks=1,
        num_steps=2_000,
        step_of=lambda *_: step,
        costs=HostCosts(synchronize_ns=8_000),
        clock_of=lambda _: DeviceClock(rate_ppm=-60.0, drift_ppm_per_s=0.02),
    )
    (truth,), (trace,) = write_device_traces(tmp_path, job), _traces(tmp_path, 1)
    rows = _phase(trace, Phase.FORWARD)
    assert (rows["device_begin_ns"] > 0).all()
    # What is left is the drift since the last anchor.
    error_ns = np.abs(rows["device_begin_ns"] - truth.first_ns[:, Phase.FORWARD])[1:]
    assert error_ns.max() <= 30_000 and np.median(error_ns) <= 10_000
    (source,) = trace.tables["events"]["kind"]
    assert source == EventKind.DEVICE_SOURCE
