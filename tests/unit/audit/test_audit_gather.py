"""Bringing the facts of all ranks to rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpace.audit.gather import gather_by_files, joined, own_part, snapshot_folder
from hpcpace.audit.hostnames import exclude_option, expand, short_list
from hpcpace.errors import UsageError
from hpcpace.world.environment import rank_info

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
}


def _environ(rank: int) -> dict[str, str]:
    return {**STEP, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def _part(rank: int) -> dict:
    environ = _environ(rank)
    return json.loads(json.dumps(own_part(rank_info(environ, host="n1"), environ)))


def test_the_facts_of_all_ranks_come_to_rank_0_through_a_folder(tmp_path: Path) -> None:
    results = {}
    for rank in (1, 0):
        environ = _environ(rank)
        info = rank_info(environ, host="n1")
        results[rank] = gather_by_files(info, environ, tmp_path, _part(rank), timeout_s=5)
    assert results[1] is None
    (snapshot,) = results[0].snapshots  # type: ignore[union-attr]
    assert [rank.rank for rank in snapshot.ranks] == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_hosts_that_do_not_answer_are_named(tmp_path: Path) -> None:
    environ = _environ(0)
    gathered = gather_by_files(rank_info(environ, host="n1"), environ, tmp_path, _part(0), timeout_s=0.1)
    assert gathered is not None
    assert gathered.missing == (
        "n2 did not answer within 0.1 s",
        "1 of 2 ranks did not answer within 0.1 s: 1",
    )


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--save"):
        gather_by_files(rank_info(_environ(0), host="n1"), _environ(0), tmp_path / "file", _part(0), timeout_s=1)


@pytest.mark.parametrize(
    "damaged",
    [None, 7, {}, {"error": "cut off"}, {"host_key": "x", "host": "n2", "snapshot": "{", "rank": {}, "unreadable": {}}],
)
def test_a_damaged_part_is_left_out_and_said_so(damaged: object) -> None:
    gathered = joined([_part(0), damaged], 2, STEP, 1.0)
    assert len(gathered.snapshots) == 1
    assert any("damaged" in text for text in gathered.missing)


def test_a_host_whose_first_rank_is_missing_is_named() -> None:
    gathered = joined([{**_part(1), "snapshot": None}], 2, STEP, 1.0)
    assert gathered.snapshots == ()
    assert "the first rank of n1 did not hand in the host's facts" in gathered.missing


@pytest.mark.parametrize(("restarts", "attempt"), [(None, 0), ("2", 2), ("x", 0)])
def test_all_ranks_and_restarts_find_the_same_folder(restarts: str | None, attempt: int) -> None:
    environ = {**STEP, **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
    assert snapshot_folder(environ) == Path(f"runs/17.0-audit/attempt-{attempt}/snapshot")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu5", ["n08", "n09", "n10", "n12", "gpu5"]),
        ("r[1-2]n", ["r1n", "r2n"]),
    ],
)
def test_lists_of_hosts_are_expanded(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n[1-99999999]", "n[1]m[2]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        expand(text)


def test_names_that_no_slurm_has_are_quoted() -> None:
    assert short_list(["n\x1b1", "n2"]) == "n2,n\\x1b1"
    assert exclude_option(["n1;reboot"]) == "--exclude='n1;reboot'"
