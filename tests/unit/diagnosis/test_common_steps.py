from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcpace.core.errors import CannotTell
from hpcpace.diagnosis.credible import ranks_with_common_steps
from hpcpace.diagnosis.incomplete import MARK_STEPS
from hpcpace.diagnosis.measure import Selection, measure
from hpcpace.trace.schema import TABLES, EventKind, StepFlag, TraceHeader
from hpcpace.trace.tables import RankTrace, Table

NUM_STEPS, NUM_WARMUP = 10, 2


def traces(lost_steps: dict[int, int], num_ranks: int = 4, version: str = "1") -> list[RankTrace]:
    """Return the traces of a run, which differ in how many last steps they lack, by rank."""
    return [_trace(rank, num_ranks, NUM_STEPS - lost_steps.get(rank, 0), version) for rank in range(num_ranks)]


def _trace(rank: int, num_ranks: int, num_steps: int, version: str) -> RankTrace:
    header = TraceHeader(
        run_id="r", attempt=0, rank=rank, world_size=num_ranks, local_rank=0, local_size=1, node=0, host="n"
    )
    header = replace(header, hpcpace_version=version)
    rows = {name: np.zeros(num_steps if name == "steps" else 0, table.dtype) for name, table in TABLES.items()}
    rows["steps"]["step"] = np.arange(num_steps)
    rows["steps"]["flags"][:NUM_WARMUP] = StepFlag.WARMUP
    tables = {name: Table.from_rows(of_table) for name, of_table in rows.items()}
    return RankTrace(Path(f"rank-{rank:05d}.h5"), header, tables, (), True, tables["collectives"])


def ranks(traces) -> list[int]:
    return [trace.header.rank for trace in traces]


def test_ranks_that_share_a_step_stay_together_however_few_steps_one_has():
    kept, said = ranks_with_common_steps(traces({2: 7}), Selection())
    assert (ranks(kept), said) == ([0, 1, 2, 3], [])


def test_a_rank_without_a_step_is_left_out_and_named_with_its_file():
    kept, said = ranks_with_common_steps(traces({2: 10}), Selection())
    assert ranks(kept) == [0, 1, 3]
    assert len(said) == 1
    assert "rank-00002.h5: rank 2 shares none of its 0 steps" in said[0]
    assert said[0].endswith(f"if it trains, {MARK_STEPS}")
    assert "session.step()" not in ranks_with_common_steps(traces({2: 10}, version=""), Selection())[1][0]


def test_a_rank_that_has_warm_up_steps_only_shares_none_unless_they_count():
    found = traces({1: 8})
    assert ranks(ranks_with_common_steps(found, Selection())[0]) == [0, 2, 3]
    assert ranks(ranks_with_common_steps(found, Selection(include_warmup=True))[0]) == [0, 1, 2, 3]


def test_only_steps_of_the_selection_count():
    kept, _ = ranks_with_common_steps(traces({0: 3, 1: 3}), Selection(first=8))
    assert ranks(kept) == [2, 3]


def test_where_nobody_has_a_step_nobody_is_left_out():
    kept, said = ranks_with_common_steps(traces(dict.fromkeys(range(4), 10)), Selection())
    assert (ranks(kept), said) == ([0, 1, 2, 3], [])


def test_where_hpcpace_saw_no_step_the_error_says_what_to_call():
    for found, is_said in (
        (traces(dict.fromkeys(range(2), 10), 2), True),
        (traces(dict.fromkeys(range(2), 10), 2, version=""), False),
        ([replace(trace, closed_cleanly=False) for trace in traces(dict.fromkeys(range(2), 10), 2)], False),
    ):
        with pytest.raises(CannotTell, match="steps were not marked") as error:
            measure(found, Selection())
        assert ("if it trains, call session.step()" in str(error.value)) is is_said


def test_each_of_many_ranks_without_common_steps_is_named():
    _, said = ranks_with_common_steps(traces(dict.fromkeys(range(10), 10), num_ranks=16), Selection())
    assert len(said) == 10
    assert all("shares none of its" in sentence for sentence in said)


def test_where_no_step_was_seen_the_error_says_what_was():
    found = traces(dict.fromkeys(range(2), 10), 2)
    rows = np.zeros(1, TABLES["events"].dtype)
    rows["kind"], rows["text"] = EventKind.STEP_SOURCE, b"0 steps by unknown: gradients add up"
    tables = {**found[1].tables, "events": Table.from_rows(rows)}
    with pytest.raises(CannotTell, match=r"or files are mixed \(steps by unknown: gradients add up\): if it trains"):
        measure([found[0], replace(found[1], tables=tables)], Selection())
