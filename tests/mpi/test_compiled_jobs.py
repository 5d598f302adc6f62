"""torch.compile neither meets the observer nor hides collectives from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.trace.reader import read_trace

PROGRAM = Path(__file__).with_name("compiled_program.py")
NUM_STEPS = 6


def _lines(stderr: str) -> set[str]:
    """Return what was said, without times, process numbers and the ranks' order."""
    return {re.sub(r"[0-9.:]+", "", line) for line in stderr.splitlines()}


@pytest.mark.parametrize("has_layer", ["false"] if find_layer() is None else only_nightly(["true"], ["false"]))
def test_a_compiled_job_is_traced_like_a_plain_one(
    mpiexec: Callable[..., CompletedProcess[str]], tmp_path: Path, has_layer: str
) -> None:
    untraced = mpiexec(2, PROGRAM, "--compile")
    results, counts = {}, {}
    for name, arguments in {"plain": (), "compiled": ("--compile",)}.items():
        run_dir = tmp_path / name
        result = results[name] = mpiexec(2, PROGRAM, *arguments, "--run-dir", run_dir, HPCPACE_TRACE_COMPILED=has_layer)
        assert result.returncode == 0, result.stderr
        assert result.stdout == untraced.stdout
        (attempt,) = open_run(run_dir).attempts()
        for rank, path in attempt.trace_files().items():
            tables = read_trace(path).tables
            assert tables["steps"]["step"].tolist() == list(range(NUM_STEPS))
            counts[name, rank] = Counter(
                zip(*(tables["collectives"][column].tolist() for column in ("step", "op", "bytes")), strict=True)
            )
    assert _lines(results["compiled"].stderr) <= _lines(untraced.stderr)
    for rank in range(2):
        # DDP sends its parameters and buckets in other pieces when it is compiled; what the function sends is the same.
        assert _of_the_function(counts["compiled", rank]) == _of_the_function(counts["plain", rank])
        assert _of_the_function(counts["plain", rank]).total() >= 3 * NUM_STEPS
        assert counts["compiled", rank].total() == counts["compiled", 0].total()


def _of_the_function(counts: Counter[tuple[int, int, int]]) -> Counter[tuple[int, int, int]]:
    scalar_bytes = 4
    return Counter({key: number for key, number in counts.items() if key[2] == scalar_bytes})
