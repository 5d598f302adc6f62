"""Ranks tie the clocks of their devices to those of their hosts in the same steps."""

from __future__ import annotations

import pytest
from cases import each_case
from simulated_device import SimulatedRank

from hpcpace.observe.device.clock import DeviceClock
from hpcpace.observe.device.layer import DeviceLayer
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import TraceHeader

MS = 1_000_000
HEADER = TraceHeader(run_id="r", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="n")


def _anchored_steps(tmp_path, monkeypatch, *, step_ns, num_steps, is_shared, moves_at=-1):
    """The steps after which a rank waited for its device."""
    rank, found = SimulatedRank(), []
    device = {"number": 0}
    clock = DeviceClock(rank.new_event, clock=rank.clock, current_device=lambda: device["number"])
    layer = DeviceLayer(clock)
    layer.record_into(Recorder(tmp_path / "rank-00000.h5", HEADER, warn=pytest.fail))
    clock.anchor()
    anchor = clock.anchor
    monkeypatch.setattr(clock, "anchor", lambda resolve: (found.append(number), anchor(resolve)))
    for number in range(1, num_steps + 1):
        rank.compute(step_ns)
        device["number"] = int(number >= moves_at > 0)
        layer.end_step(number, is_shared=is_shared)
    return found


@each_case("step_ns", [900 * MS, 1_000 * MS, 1_100 * MS])
def test_ranks_that_compare_clocks_do_it_in_the_same_steps(tmp_path, monkeypatch, step_ns):
    found = _anchored_steps(tmp_path, monkeypatch, step_ns=step_ns, num_steps=100, is_shared=True)
    assert found == [1, 2, 4, 8, 16, 32, 64][: len(found)] and len(found) >= 5


def test_short_steps_have_few_of_them(tmp_path, monkeypatch):
    found = _anchored_steps(tmp_path, monkeypatch, step_ns=10 * MS, num_steps=10_000, is_shared=True)
    assert found == [2**power for power in range(len(found))] and found[-1] <= 4096


def test_a_rank_alone_does_it_by_time(tmp_path, monkeypatch):
    found = _anchored_steps(tmp_path, monkeypatch, step_ns=1_000 * MS, num_steps=60, is_shared=False)
    assert found == [1, 5, 21, 51]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_rank_that_takes_another_device_ties_that(tmp_path, monkeypatch, is_shared):
    found = _anchored_steps(tmp_path, monkeypatch, step_ns=1_000 * MS, num_steps=60, is_shared=is_shared, moves_at=55)
    assert 55 in found
