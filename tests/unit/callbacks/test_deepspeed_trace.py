"""Two lines around the loop of an engine of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcpace.callbacks.deepspeed import trace
from hpcpace.trace.schema import Phase


class _Engine:
    """What the trace uses of an engine."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate, self._num_microbatches = accumulate, 0

    def gradient_accumulation_steps(self) -> int:
        return self._accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        return 4

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._num_microbatches + 1) % self._accumulate == 0

    def step(self) -> None:
        self._num_microbatches += 1

    def save_checkpoint(self, folder: str) -> str:
        return folder


class _PipelineEngine(_Engine):
    def train_batch(self) -> float:
        for _ in range(self._accumulate):
            self.step()
        return 0.5

    def eval_batch(self) -> float:
        return 0.25


@pytest.mark.parametrize(("accumulate", "samples"), [(1, [4, 4, 4, 4]), (2, [8, 8])])
def test_a_step_ends_where_gradients_are_not_accumulated_further(
    tmp_path: Path, recorded: Callable[[], Any], accumulate: int, samples: list[int]
) -> None:
    engine = _Engine(accumulate)
    with trace(engine, run_dir=tmp_path):
        for _ in range(4):
            engine.step()
    assert recorded().samples == samples


def test_a_batch_of_a_pipeline_is_one_step(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    engine = _PipelineEngine(4)
    with trace(engine, run_dir=tmp_path):
        assert [engine.train_batch(), engine.train_batch(), engine.eval_batch()] == [0.5, 0.5, 0.25]
    assert recorded().samples == [16, 16]
    assert recorded().num_phases(Phase.EVAL) == 1


def test_a_saved_checkpoint_is_a_phase(tmp_path: Path, recorded: Callable[[], Any]) -> None:
    engine = _Engine(1)
    with trace(engine, run_dir=tmp_path):
        assert engine.save_checkpoint("there") == "there"
    assert recorded().num_phases(Phase.CHECKPOINT) == 1


def test_the_engine_is_as_before_at_the_end(tmp_path: Path) -> None:
    engine = _Engine(1)
    before = set(vars(engine))
    with pytest.raises(ValueError, match="own"), trace(engine, run_dir=tmp_path):
        raise ValueError("own")
    assert set(vars(engine)) == before
