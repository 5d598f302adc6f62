from __future__ import annotations

import json
import os
from pathlib import Path

from cases import each_case

from hpcpace.core.rundir import Attempt
from hpcpace.diagnosis.records import ResultRecord, read_result_record
from hpcpace.diagnosis.summary import RankMemory


def test_outcome_and_memory_are_read_in_order_of_ranks(tmp_path: Path) -> None:
    rows = [{"rank": rank, "host": "n1", "rss_bytes": 100 + rank, "device_bytes": 7} for rank in (1, 0)]
    (tmp_path / "result.json").write_text(json.dumps({"outcome": "finished", "peak_memory": rows, "losses": [1.0]}))
    found = read_result_record(Attempt(tmp_path), [])
    assert (found.outcome, found.cause) == ("finished", "")
    assert found.memory == (
        RankMemory(rank=0, rss_bytes=100, device_bytes=7),
        RankMemory(rank=1, rss_bytes=101, device_bytes=7),
    )


@each_case(
    "content",
    [
        None,
        "",
        "[]",
        "7",
        '{"peak_memory": 3}',
        '{"peak_memory": [1]}',
        '{"peak_memory": [{"rank": "x"}]}',
        "[" * 99999,
    ],
)
def test_a_file_that_is_missing_or_foreign_tells_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    assert read_result_record(Attempt(tmp_path), []) == ResultRecord()


def test_a_pipe_in_its_place_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.json")
    assert read_result_record(Attempt(tmp_path), []) == ResultRecord()
