"""`session.metrics()`: the figures of a rank's last steps are those of its trace, each step once, from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcpace
from hpcpace.metrics.phases import Part, parts_of_steps
from hpcpace.observe.exporters import PART_NAMES, StepFigures
from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import RecentRows
from hpcpace.trace.schema import DEVICE_TABLES, StepFlag, row_dtypes


def test_each_part_has_the_name_that_is_logged() -> None:
    """Parts added later would be logged under a wrong name."""
    own = {part.name.lower(): name for part, name in zip(Part, PART_NAMES, strict=True)}
    blocked = ("sync_wait", "sync_transfer", "wait", "transfer")
    assert own == {name: name for name in own} | dict.fromkeys(blocked, "communication") | {"host": "other"}


def _train(session: Any, num_steps: int, each: Callable[[], None] = lambda: None) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        with session.phase("data"):
            batch = torch.zeros(4, 64)
        model(batch).sum().backward()
        optimizer.step()
        session.step(samples=4)
        each()


def test_figures_of_all_calls_together_are_those_of_the_trace(tmp_path: Path) -> None:
    found: list[dict[str, float]] = []
    with hpcpace.session(run_dir=tmp_path, config_file=_fast_flushes(tmp_path)) as session:
        for _ in range(20):
            _train(session, 3)
            assert session._recording is not None and session._recording.recorder.flush()
            _train(session, 2)
            found.append(session.metrics())
        last = session.metrics(last_steps=100)
        assert session.metrics() == {}
    assert session.metrics() == {}
    tables = read_trace(tmp_path / "attempt-0" / "trace" / "rank-00000.h5").tables
    steps, phases = tables["steps"], tables["phases"]
    parts_ns = parts_of_steps(
        (steps["begin_ns"], steps["end_ns"]),
        (phases["phase"], phases["begin_ns"], phases["end_ns"]),
        tuple(np.zeros(0, np.int64) for _ in range(4)),
    )
    assert [one["hpcpace/steps"] for one in found] == [5.0] * 20 and last["hpcpace/steps"] == 100
    for name in ("data", "forward", "backward", "optimizer", "other"):
        mean_ms = sum(parts_ns[:, part].mean() for part in Part if PART_NAMES[part] == name) / 1e6
        # Times in the file are whole microseconds.
        assert last[f"hpcpace/{name}_ms"] == pytest.approx(mean_ms, abs=0.003), name
        assert np.mean([one[f"hpcpace/{name}_ms"] for one in found]) == pytest.approx(mean_ms, abs=0.003), name
    assert last["hpcpace/step_ms"] == pytest.approx((steps["end_ns"] - steps["begin_ns"]).mean() / 1e6, abs=0.003)
    in_parts = sum(value for key, value in last.items() if key.endswith("_ms") and key != "hpcpace/step_ms")
    assert in_parts == pytest.approx(last["hpcpace/step_ms"], rel=1e-6)
    assert last["hpcpace/samples_per_s"] == pytest.approx(4000 / last["hpcpace/step_ms"], rel=1e-6)
    assert all(type(value) is float for value in last.values())


def _fast_flushes(folder: Path) -> Path:
    settings = folder / "settings.toml"
    settings.write_text("[trace]\nflush_interval_s = 0.01\n")
    return settings


def test_threads_that_ask_at_once_get_each_step_once(tmp_path: Path) -> None:
    counts: list[float] = []
    is_over = threading.Event()
    with hpcpace.session(run_dir=tmp_path, config_file=_fast_flushes(tmp_path)) as session:

        def ask() -> None:
            while not is_over.wait(0.001):
                counts.append(session.metrics().get("hpcpace/steps", 0.0))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        _train(session, 300)
        is_over.set()
        for thread in threads:
            thread.join()
        counts.append(session.metrics().get("hpcpace/steps", 0.0))
    assert sum(counts) == 300


def test_there_are_none_without_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hpcpace.session(run_dir=tmp_path) as outer:
        with hpcpace.session(run_dir=tmp_path / "inner") as inner:
            assert inner.metrics() == {}
        outer.step()
        child = os.fork()
        if not child:
            os._exit(len(outer.metrics()))
        assert os.waitpid(child, 0)[1] == 0
        monkeypatch.setattr(StepFigures, "take", lambda *_: 1 / 0)
        assert (outer.metrics(), outer.metrics()) == ({}, {})
    assert capsys.readouterr().err.count("session.metrics() fails: division by zero") == 1


def test_steps_with_less_detail_have_no_parts(tmp_path: Path) -> None:
    with hpcpace.session(run_dir=tmp_path, steps="0:2") as session:
        _train(session, 2)
        assert "hpcpace/forward_ms" in session.metrics()
        _train(session, 2)
        found = session.metrics()
    assert (found["hpcpace/steps"], "hpcpace/forward_ms" in found) == (2.0, False)


def test_rows_are_handed_out_once_and_the_oldest_are_given_up() -> None:
    recent, buffer = RecentRows(1), [bytes([number]) for number in range(5)]
    assert recent.take(buffer) == (bytes(range(5)), False)
    recent.keep(bytes(range(5)))
    assert recent.take([]) == (b"", False)
    assert recent.take([b"\7", b"\10"]) == (b"\7\10", False)
    recent.keep(b"\7")
    assert recent.take([b"\10", b"\11"]) == (b"\11", False)
    recent.keep(b"\10\11")
    for number in range(5):
        recent.keep(bytes([number]) * 8192)
    packed, has_gap = recent.take([])
    assert (len(packed), set(packed), has_gap) == (16_384, {3, 4}, True)
    recent.keep(bytes([1]) + bytes([2]) * 16_384)
    assert recent.take([]) == (bytes([2]) * 16_384, True)


class _Rows:
    """Hands out rows of a rank with a device, as the recorder does."""

    def __init__(self, **tables: list[tuple[int, ...]]) -> None:
        self._tables = tables

    def take_recent(self, table: str) -> tuple[Any, bool]:
        return np.array(self._tables.pop(table, []), dtype=row_dtypes(DEVICE_TABLES)[table]), False


def test_on_a_device_times_are_those_of_the_device() -> None:
    rows = _Rows(
        steps=[(0, 0, 10_000_000, 4, StepFlag.NONE, 100_000_000, 120_000_000), (1, 0, 1, 4, StepFlag.NONE, 0, 0)],
        phases=[
            (0, 1, 0, 1_000_000, -1, 100_000_000, 108_000_000),
            (0, 2, 1_000_000, 2_000_000, -1, 108_000_000, 118_000_000),
            (0, 0, 0, 1, -1, 0, 0),
        ],
        collectives=[
            (0, 0, 0, 0, 8, -1, 112_000_000, 118_000_000, 4_000_000, 0, 111_000_000),
            (0, 1, 0, 0, 8, -1, 100_000_000, 118_000_000, 9_000_000, 0, 100_000_000),
        ],
    )
    found = StepFigures(rows, parts_of_steps).take(None)
    assert found["hpcpace/step_ms"] == 20
    names = ("forward", "backward", "communication", "other")
    assert [found[f"hpcpace/{name}_ms"] for name in names] == [8, 6, 4, 2]
