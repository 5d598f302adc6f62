"""A session of the script inside a job that `hpcpace trace` records names the steps of that trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.observe.launch.follower import Follower
from hpcpace.observe.session import Session
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind, Phase, StepFlag

NUM_ITERATIONS = 12
CONFIG = Config(TraceConfig(counters=False, snapshot=False))


def _outer(folder: Path, **options: Any) -> Session:
    return hpcpace.session(run_dir=folder / "run", config=CONFIG, world=rank_info({}), **options)


def _loop(inner: Any) -> None:
    """Make two updates in each iteration, which the script calls one step of seven samples."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(NUM_ITERATIONS):
        with inner.phase("data"):
            batch = torch.rand(4, 3)
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if iteration == 0:
            model.eval()
            with torch.no_grad():
                nn.MSELoss()(model(batch), batch[:, :1])
            model.train()
        inner.step(samples=7)


def test_steps_samples_and_phases_are_those_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _outer(tmp_path, step_from="auto") as outer:
        with hpcpace.session(name="mine", run_dir=tmp_path / "mine") as inner:
            assert inner.is_recording and inner.run == outer.run
            _loop(inner)
            assert inner.metrics(last_steps=3)["hpcpace/samples_per_s"] > 0
        assert inner.recorded is not None and inner.recorded["steps"] == NUM_ITERATIONS
        assert outer.is_recording, "it goes on"
        inner.step()
    assert capsys.readouterr().err.count("the session in the script names its steps, samples and phases") == 1
    assert outer.recorded is not None and outer.attempt is not None
    assert (outer.recorded["steps"], outer.recorded["steps_from"]) == (NUM_ITERATIONS, "named by the script")
    tables = read_trace(outer.attempt.trace_file(0)).tables
    assert tables["steps"]["step"].tolist() == list(range(NUM_ITERATIONS))
    assert tables["steps"]["samples"].tolist() == [7] * NUM_ITERATIONS
    assert tables["steps"]["flags"][0] & StepFlag.EVAL
    phases = tables["phases"]
    for phase, number in ((Phase.DATA, 1), (Phase.FORWARD, 2), (Phase.BACKWARD, 2), (Phase.OPTIMIZER, 2)):
        steps = phases["step"][phases["phase"] == phase].tolist()
        assert steps == [step for step in range(NUM_ITERATIONS) for _ in range(number)], phase
    events = tables["events"]
    last = (events["kind"] == EventKind.STEP_SOURCE).nonzero()[0][-1]
    assert events["text"][last].decode() == "0 steps by session.step(): named by the script"
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("step_from", [None, "optimizer"])
def test_a_recording_whose_steps_are_decided_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step_from: str | None
) -> None:
    with _outer(tmp_path, step_from=step_from) as outer, hpcpace.session(run_dir=tmp_path / "mine") as inner:
        _loop(inner)
    assert inner.recorded is None and capsys.readouterr().err.count("this session records nothing") == 1
    assert outer.recorded is not None and outer.recorded["steps"] == (0 if step_from is None else 2 * NUM_ITERATIONS)


def test_a_process_of_its_own_is_recorded_before_its_script_opens_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    follower = Follower(SimpleNamespace(pid=0))
    monkeypatch.setattr(follower, "_begin", lambda world: begun.append(world.rank))
    monkeypatch.setattr(follower, "_stop_waiting", [lambda: None])
    monkeypatch.setattr(Session, "before_start", None)
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    follower.follow(SimpleNamespace(__name__="hpcpace.observe.session", Session=Session))
    assert Session.before_start is not None
    Session.before_start()
    Session.before_start()
    assert begun == [0]


def test_a_session_that_names_no_step_keeps_none_from_being_found(tmp_path: Path) -> None:
    with _outer(tmp_path, step_from="auto") as outer, hpcpace.session(run_dir=tmp_path / "mine") as inner:
        _loop(SimpleNamespace(phase=inner.phase, step=lambda samples: None))
    assert outer.recorded is not None and outer.recorded["steps"] == 2 * NUM_ITERATIONS


def test_a_second_session_goes_on_with_the_steps(tmp_path: Path) -> None:
    with _outer(tmp_path, step_from="auto") as outer:
        for _ in range(2):
            with hpcpace.session(run_dir=tmp_path / "mine") as inner:
                _loop(inner)
    assert outer.recorded is not None and outer.recorded["steps"] == 2 * NUM_ITERATIONS
