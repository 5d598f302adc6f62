"""A session whose rank has a device that does everything at once: whatever happens, its rows have marks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.observe import recording
from hpcpace.observe.device.clock import DeviceClock
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind, Phase

NUM_STEPS = 12


class InstantEvent:
    """An event on a device that passes each at once."""

    num_made = 0

    def __init__(self, clock):
        InstantEvent.num_made += 1
        self._clock, self.at_ns = clock, 0

    def record(self):
        self.at_ns = self._clock()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end_event):
        return (end_event.at_ns - self.at_ns) / 1e6


@pytest.fixture
def device(monkeypatch):
    InstantEvent.num_made = 0
    clock = DeviceClock(lambda: InstantEvent(time.monotonic_ns))
    monkeypatch.setattr(recording, "find_device", lambda warn: clock)
    return clock


def _session(tmp_path: Path, **changes):
    config = Config(TraceConfig(counters=False, snapshot=False))
    return hpcpace.session(run_dir=tmp_path / "run", config=config, world=rank_info({}), **changes)


def _train(session=None, num_steps: int = NUM_STEPS):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        loss = model(torch.full((2, 4), float(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if session is not None:
            session.step()
    return losses


def _tables(session):
    trace = read_trace(session.attempt.trace_file(0))
    assert trace.problems == () and trace.closed_cleanly
    return trace.tables


def _assert_marked(rows, num_rows):
    assert len(rows) == num_rows
    for edge in ("begin_ns", "end_ns"):
        assert (np.abs(rows[f"device_{edge}"] - rows[edge]) < 100_000_000).all()


def _phases(tables, phase):
    return tables["phases"].select(tables["phases"]["phase"] == phase)


def test_steps_and_phases_have_times_of_the_device(device, tmp_path):
    plain = _train()
    with _session(tmp_path) as session:
        assert _train(session) == plain
    tables = _tables(session)
    _assert_marked(tables["steps"], NUM_STEPS)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        rows = _phases(tables, phase)
        _assert_marked(rows, NUM_STEPS)
        assert rows["step"].tolist() == list(range(NUM_STEPS))


def test_steps_that_are_found_have_the_marks_of_their_optimizers(device, tmp_path):
    with _session(tmp_path, step_from="auto") as session:
        _train()
    tables = _tables(session)
    _assert_marked(tables["steps"], NUM_STEPS)
    optimizer = _phases(tables, Phase.OPTIMIZER)
    assert optimizer["step"].tolist() == list(range(NUM_STEPS))
    # A step ends where its optimizer returns: one mark, one time.
    assert np.array_equal(tables["steps"]["device_end_ns"], optimizer["device_end_ns"])


def test_rows_of_a_job_that_fails_are_all_written(device, tmp_path):
    with pytest.raises(ZeroDivisionError), _session(tmp_path) as session:
        _train(session)
        1 / 0  # noqa: B018
    tables = _tables(session)
    assert len(tables["steps"]) == len(_phases(tables, Phase.FORWARD)) == NUM_STEPS


def test_how_times_were_found_is_recorded(device, tmp_path):
    with _session(tmp_path) as session:
        _train(session)
    events = _tables(session)["events"]
    (text,) = events["text"][events["kind"] == EventKind.DEVICE_SOURCE]
    assert text.startswith(b"marks: ") and b" 0 not made; operations: 0 captured in graphs, 0 without an event" in text


def test_a_rank_whose_device_is_not_in_use_has_zeros(device, tmp_path):
    device._current_device = lambda: None
    with _session(tmp_path) as session:
        _train(session)
    tables = _tables(session)
    for name in ("steps", "phases"):
        assert len(tables[name]) > 0
        assert not tables[name]["device_begin_ns"].any() and not tables[name]["device_end_ns"].any()
    assert InstantEvent.num_made == 0


def test_a_device_that_breaks_costs_one_warning_and_no_row(device, tmp_path, capfd):
    device._warn = lambda message: print(message, flush=True)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with _session(tmp_path) as session:
        _train(session, num_steps=3)
        device._current_device = broken
        _train(session, num_steps=3)
    tables = _tables(session)
    assert len(tables["steps"]) == len(_phases(tables, Phase.FORWARD)) == 6
    assert capfd.readouterr().out.count("times on the device end here: CUDA error: an illegal memory access") == 1
