"""A mistyped variable of hpcpace in somebody else's job: one warning, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

OWN_SCRIPT = Path(__file__).with_name("own_script.py")


def test_a_traced_program_goes_on_with_one_warning(
    python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    done = python("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", OWN_SCRIPT, "2", HPCPACE_TRACE_FLUSH="3")
    assert done.returncode == 0
    assert done.stderr.count("HPCPACE_TRACE_FLUSH (did you mean HPCPACE_TRACE_FLUSH_INTERVAL_S?); ignored") == 1
    assert (tmp_path / "run" / "attempt-0" / "trace" / "rank-00000.h5").exists()
