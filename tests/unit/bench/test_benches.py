"""No benchmark is forgotten: each has its row in `make bench-quick`, which CI runs."""

from __future__ import annotations

from pathlib import Path

from experiments.bench.__main__ import FULL, QUICK

FOLDER = Path(__file__).parents[3] / "experiments" / "bench"


def test_every_benchmark_runs_in_a_small_size() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert {name for name, *_ in QUICK} == programs - {"__main__"}
    assert {name for name, *_ in FULL} <= programs
