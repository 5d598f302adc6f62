"""The callback of Hugging Face's Trainer, in a loop that calls it as the Trainer does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.trace.schema import Phase, StepFlag

_ARGS = SimpleNamespace(train_batch_size=8)


@pytest.fixture
def callback(framework: Callable[..., None], tmp_path: Path) -> Any:
    framework("transformers", TrainerCallback=type("TrainerCallback", (), {}))
    return importlib.import_module("hpcpace.callbacks.transformers").TraceCallback(run_dir=tmp_path)


def _step(callback: Any, *, accumulate: int = 1, should_evaluate: bool = False, should_save: bool = False) -> None:
    control = SimpleNamespace(should_evaluate=should_evaluate, should_save=should_save)
    for _ in range(accumulate - 1):
        callback.on_substep_end(_ARGS, None, control)
    callback.on_step_end(_ARGS, None, control)
    if should_evaluate:
        callback.on_evaluate(_ARGS, None, control, metrics={})
    if should_save:
        callback.on_save(_ARGS, None, control)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_microbatches_are_one_step(callback: Any, recorded: Callable[[], Any], accumulate: int) -> None:
    callback.on_train_begin(_ARGS, None, None, model=None)
    for _ in range(3):
        _step(callback, accumulate=accumulate)
    callback.on_train_end(_ARGS, None, None)
    assert recorded().samples == [8 * accumulate] * 3


@pytest.mark.parametrize(
    ("next_is", "phases", "flags"),
    [
        ({"should_evaluate": True}, (1, 0), StepFlag.EVAL),
        ({"should_save": True}, (0, 1), StepFlag.CHECKPOINT),
        ({"should_evaluate": True, "should_save": True}, (1, 1), StepFlag.EVAL | StepFlag.CHECKPOINT),
    ],
)
def test_what_follows_a_step_is_a_phase_of_the_next(
    callback: Any, recorded: Callable[[], Any], next_is: dict[str, bool], phases: tuple[int, int], flags: StepFlag
) -> None:
    callback.on_train_begin(_ARGS, None, None)
    _step(callback, **next_is)
    _step(callback)
    callback.on_train_end(_ARGS, None, None)
    assert tuple(recorded().num_phases(phase) for phase in (Phase.EVAL, Phase.CHECKPOINT)) == phases
    assert recorded().flags == [0, flags]


@pytest.mark.usefixtures("framework")
def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs Transformers.*pip install transformers"):
        importlib.import_module("hpcpace.callbacks.transformers")
