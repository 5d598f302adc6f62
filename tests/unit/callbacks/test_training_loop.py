"""The session of a framework's loop: its steps and phases are the loop's, and its errors stay in it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case

from hpcpace.callbacks import TracedLoop, count_samples, needs
from hpcpace.trace.schema import Phase, StepFlag


def _loop(tmp_path: Path) -> TracedLoop:
    return TracedLoop({"run_dir": tmp_path})


def test_a_step_has_the_samples_since_the_last_one(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    loop = _loop(tmp_path)
    loop.begin()
    for counts in ((4, 4), (2,), ()):
        for num_samples in counts:
            loop.add_samples(num_samples)
        loop.step()
    loop.end()
    assert recorded().samples == [8, 2, 0]


def test_the_step_with_an_evaluation_is_marked(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    loop = _loop(tmp_path)
    loop.begin()
    loop.step()
    loop.begin_phase("eval")
    loop.begin_phase("eval")
    loop.end_phase("eval")
    loop.step()
    loop.step()
    loop.end()
    assert recorded().flags == [0, StepFlag.EVAL, 0]
    assert recorded().num_phases(Phase.EVAL) == 1


def test_a_replaced_method_is_back_at_the_end(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    class Engine:
        def save(self) -> str:
            return "saved"

    loop, engine = _loop(tmp_path), Engine()
    loop.begin()
    loop.replace(engine, "save", loop.timed("checkpoint"))
    assert engine.save() == "saved"
    loop.end()
    assert vars(engine) == {}
    assert recorded().num_phases(Phase.CHECKPOINT) == 1


def test_what_fails_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = _loop(tmp_path)
    for _ in range(2):
        loop.replace(object(), "no_such_method", lambda method: method)
    assert capsys.readouterr().err.splitlines() == [
        "hpcpace: warning: the callback failed: 'object' object has no attribute 'no_such_method'"
    ]


def test_an_argument_that_sessions_do_not_have_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match="warm_up"):
        TracedLoop({"warm_up": 3})


def test_without_begin_nothing_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = _loop(tmp_path)
    loop.begin_phase("eval")
    loop.step()
    loop.end_phase("eval")
    loop.end()
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


@each_case(
    ("batch", "num_samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"label": "text", "x": {"inner": torch.zeros(7)}}, 7),
        (torch.tensor(1.0), 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_samples_of_a_batch(batch: Any, num_samples: int) -> None:
    assert count_samples(batch) == num_samples


def test_a_batch_that_contains_itself_has_no_samples() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert count_samples(batch) == 0


def test_a_missing_framework_is_named_with_what_to_install() -> None:
    message = r"needs Sunshine, .* no module no_such_module: pip install sunshine"
    with pytest.raises(ImportError, match=message), needs("Sunshine", "sunshine"):
        import_module("no_such_module")
