"""Rows of ranks with a device: what their devices did is the scenario, and their hosts issued it before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cases import each_case

from experiments.score.generator import traces_of, write_run
from experiments.score.scenario import Scenario
from hpcpace.diagnosis.devices import is_host_timed, on_devices
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase

SMALL = {"num_ranks": 8, "num_steps": 12, "ranks_per_node": 2, "seed": 4}
KINDS = ("synchronised", "ahead", "host_bound")


@each_case("kind", KINDS)
@each_case("layout", [{}, {"num_stages": 4}])
def test_on_their_devices_ranks_do_what_they_would_do_without(kind: str, layout: dict[str, int]) -> None:
    plain = traces_of(Scenario(**SMALL, **layout))
    views = on_devices(traces_of(Scenario(**SMALL, **layout, device=kind)))
    for own, view in zip(plain, views, strict=True):
        assert not is_host_timed(view)
        phases = view.tables["phases"].select(view.tables["phases"]["phase"] != Phase.IDLE)
        for name in ("begin_ns", "end_ns"):
            assert np.abs(view.tables["steps"][name] - own.tables["steps"][name]).max() <= 256
            assert np.abs(phases[name] - own.tables["phases"][name]).max() <= 256
        assert (view.tables["collectives"]["enter_ns"] == own.tables["collectives"]["enter_ns"]).all()


@each_case("kind", KINDS)
def test_a_host_is_never_behind_its_device_and_its_times_ascend(kind: str) -> None:
    for trace in traces_of(Scenario(**SMALL, device=kind)):
        steps, phases, done = (trace.tables[name] for name in ("steps", "phases", "collectives"))
        assert (steps["begin_ns"][1:] == steps["end_ns"][:-1]).all()
        assert (phases["begin_ns"] < phases["device_begin_ns"]).all()
        assert (np.diff(phases["begin_ns"]) >= 0).all()
        assert (done["enqueue_ns"] < done["enter_ns"]).all()


def test_host_times_alone_have_no_times_of_phases_on_the_device(tmp_path: Path) -> None:
    scenario = Scenario(**SMALL, device="synchronised", data="host_times")
    for trace in read_attempt(write_run(scenario, tmp_path / "run").last_attempt()).traces:
        assert is_host_timed(trace)
        assert not trace.tables["collectives"]["blocked_ns"].any()


@each_case("kind", KINDS)
def test_runs_on_devices_are_the_same_through_files(tmp_path: Path, kind: str) -> None:
    scenario = Scenario(**SMALL, device=kind)
    read = read_attempt(write_run(scenario, tmp_path / "run").last_attempt()).traces
    for own, other in zip(traces_of(scenario), read, strict=True):
        for name in ("steps", "phases", "collectives"):
            assert list(own.tables[name]) == list(other.tables[name])
            assert all((own.tables[name][column] == other.tables[name][column]).all() for column in own.tables[name])
