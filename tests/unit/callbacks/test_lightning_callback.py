"""Lightning's callback, in a loop that calls it as Lightning does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcpace.trace.schema import Phase


class _Trainer:
    """Calls a callback in Lightning's order."""

    def __init__(self, callback: Any) -> None:
        self.global_step = 0
        self.saved: list[str] = []
        self._callback = callback

    def save_checkpoint(self, path: str) -> None:
        self.saved.append(path)

    def fit(self, num_batches: int, *, accumulate: int = 1, optimizers: int = 1) -> None:
        module, call = torch.nn.Linear(2, 2), self._callback
        call.on_fit_start(self, module)
        for number in range(num_batches):
            if (number + 1) % accumulate == 0:
                self.global_step += optimizers
            call.on_train_batch_end(self, module, None, [torch.zeros(4, 2)], number)
        call.on_validation_start(self, module)
        call.on_validation_end(self, module)
        self.save_checkpoint("last.ckpt")
        call.on_fit_end(self, module)


@pytest.fixture
def callback(framework: Callable[..., None], tmp_path: Path) -> Any:
    framework("lightning.pytorch", Callback=type("Callback", (), {}))
    return importlib.import_module("hpcpace.callbacks.lightning").TraceCallback(run_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "samples"),
    [({}, [4, 4, 4, 4]), ({"accumulate": 2}, [8, 8]), ({"optimizers": 2}, [4, 4, 4, 4])],
)
def test_a_step_is_an_update_of_the_parameters(
    callback: Any, recorded: Callable[[], Any], options: dict[str, int], samples: list[int]
) -> None:
    _Trainer(callback).fit(4, **options)
    assert recorded().samples == samples


def test_validation_and_checkpoints_are_phases(callback: Any, recorded: Callable[[], Any]) -> None:
    trainer = _Trainer(callback)
    trainer.fit(2)
    assert trainer.saved == ["last.ckpt"]
    assert "save_checkpoint" not in vars(trainer)
    assert [recorded().num_phases(phase) for phase in (Phase.EVAL, Phase.CHECKPOINT)] == [1, 1]


def test_a_second_fit_is_a_second_attempt(callback: Any, tmp_path: Path) -> None:
    trainer = _Trainer(callback)
    trainer.fit(2)
    trainer.fit(2)
    assert sorted(path.name for path in tmp_path.glob("attempt-*")) == ["attempt-0", "attempt-1"]


def test_after_an_exception_the_trace_has_the_steps_before_it(callback: Any, recorded: Callable[[], Any]) -> None:
    trainer = _Trainer(callback)
    callback.on_fit_start(trainer, torch.nn.Linear(2, 2))
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, None, torch.zeros(4, 2), 0)
    callback.on_exception(trainer, None, RuntimeError("lost"))
    assert recorded().samples == [4]


def test_the_older_package_is_used_where_only_it_is_loaded(framework: Callable[..., None]) -> None:
    base = type("Callback", (), {})
    framework("pytorch_lightning", Callback=base)
    assert issubclass(importlib.import_module("hpcpace.callbacks.lightning").TraceCallback, base)


@pytest.mark.usefixtures("framework")
def test_without_lightning_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"needs Lightning.*pip install lightning"):
        importlib.import_module("hpcpace.callbacks.lightning")
