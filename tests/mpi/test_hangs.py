"""Jobs of real ranks that hang: traces name the rank that holds up the others, and the report says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import only_nightly

from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import examine
from hpcpace.hang.from_traces import hang_in, read_records
from hpcpace.hang.views import HangKind
from hpcpace.trace.attempt_reader import read_attempt

PROGRAM = Path(__file__).with_name("hang_program.py")


@pytest.mark.parametrize(
    ("way", "kind"),
    only_nightly(
        [("chain", HangKind.NEVER_CALLED)],  # rank 3 waits for rank 2, and ranks 0 and 1 for both
        [("data", HangKind.OWN_WORK), ("operation", HangKind.MISMATCH)],
    ),
)
def test_the_rank_that_holds_up_the_others_is_named(
    torchrun: Callable[..., object], tmp_path: Path, way: str, kind: HangKind
) -> None:
    torchrun(4, PROGRAM, way, tmp_path / "run")
    attempt = RunDirectory(tmp_path / "run").attempts()[-1]
    found = hang_in(read_records(attempt), hang_s=3.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits) == (kind, (2,))
    assert set(found.hang.waiting) == {0, 1, 3}
    verdict = examine(read_attempt(attempt).traces)
    assert (verdict.mode, [culprit.id for culprit in verdict.culprits]) == ("hang", ["2"])


def test_what_gloo_aborts_a_rank_for_is_in_its_trace(torchrun: Callable[..., object], tmp_path: Path) -> None:
    torchrun(4, PROGRAM, "size", tmp_path / "run")
    records = read_records(RunDirectory(tmp_path / "run").attempts()[-1])
    found = hang_in(records, hang_s=3.0)
    assert found is not None
    assert (found.hang.kind, found.hang.culprits) == (HangKind.MISMATCH, (2,))
    aborted = [rank for rank in records.ranks if rank.end == "SIGABRT"]
    assert aborted and all(rank.ended_at.startswith("hang_program.py:") for rank in aborted)
    assert all(rank.is_open(rank.end_ns or 0).any() for rank in aborted)
