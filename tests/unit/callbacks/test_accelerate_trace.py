"""Two lines around a loop of Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.callbacks.accelerate import trace
from hpcpace.trace.schema import Phase


class _Optimizer:
    def step(self) -> str:
        return "stepped"


class _Accelerator:
    """What the trace uses of an accelerator, with two ranks."""

    num_processes = 2

    def __init__(self, accumulate: int = 1) -> None:
        self._optimizers = [_Optimizer(), _Optimizer()]
        self._accumulate, self._num_microbatches = accumulate, 0
        self.gradient_state = SimpleNamespace(active_dataloader=SimpleNamespace(total_batch_size=12))

    @property
    def sync_gradients(self) -> bool:
        return self._num_microbatches % self._accumulate == 0

    def backward(self, loss: float) -> None:
        self._num_microbatches += 1

    def end_training(self) -> None:
        pass

    def save_state(self, folder: str) -> str:
        return folder


def _train(accelerator: _Accelerator, num_batches: int) -> None:
    for _ in range(num_batches):
        accelerator.backward(0.0)
        assert [optimizer.step() for optimizer in accelerator._optimizers] == ["stepped"] * 2


@pytest.mark.parametrize(("accumulate", "samples"), [(1, [6, 6, 6, 6]), (2, [12, 12])])
def test_a_step_is_one_of_the_first_optimizer_with_synchronised_gradients(
    tmp_path: Path, recorded: Callable[[], Any], accumulate: int, samples: list[int]
) -> None:
    accelerator = _Accelerator(accumulate)
    with trace(accelerator, run_dir=tmp_path):
        _train(accelerator, 4)
    assert recorded().samples == samples


def test_without_a_prepared_loader_steps_have_no_samples(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    accelerator = _Accelerator()
    accelerator.gradient_state.active_dataloader = None
    with trace(accelerator, run_dir=tmp_path):
        _train(accelerator, 2)
    assert recorded().samples == [0, 0]


def test_a_saved_state_is_a_checkpoint(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    accelerator = _Accelerator()
    with trace(accelerator, run_dir=tmp_path):
        assert accelerator.save_state("there") == "there"
    assert recorded().num_phases(Phase.CHECKPOINT) == 1


def test_what_the_loop_raises_passes_and_the_accelerator_is_as_before(tmp_path: Path) -> None:
    accelerator = _Accelerator()
    with pytest.raises(ValueError, match="own"), trace(accelerator, run_dir=tmp_path):
        raise ValueError("own")
    assert "backward" not in vars(accelerator)
    assert vars(accelerator._optimizers[0]) == {}


def test_an_accelerator_without_an_optimizer_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = _Accelerator()
    accelerator._optimizers = []
    with trace(accelerator, run_dir=tmp_path):
        accelerator.backward(0.0)
    assert "hpcpace: warning: the callback failed: list index out of range" in capsys.readouterr().err
