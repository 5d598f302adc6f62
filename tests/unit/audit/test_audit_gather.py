"""Bringing the facts of all ranks to rank 0."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.audit import snapshot
from hpcpace.audit.snapshot import Gathered, gather_by_files, join_parts, own_part, snapshot_folder
from hpcpace.core.environment import rank_info
from hpcpace.core.errors import UsageError
from hpcpace.core.hostlist import exclude_option, expand, short_list

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
}


def _environ(rank: int, num_ranks: int = 2) -> dict[str, str]:
    num = str(num_ranks)
    size = {"SLURM_STEP_NUM_TASKS": num, "SLURM_STEP_TASKS_PER_NODE": num}
    return {**STEP, **size, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def _part(rank: int, num_ranks: int = 2) -> dict:
    return json.loads(_taken(rank, num_ranks))


@functools.cache
def _taken(rank: int, num_ranks: int) -> str:
    """Return the facts of a rank as JSON: they are this machine's, of which a busy one is watched for a second."""
    environ = _environ(rank, num_ranks)
    return json.dumps(own_part(rank_info(environ, host="n1"), environ))


def test_the_facts_of_all_ranks_come_to_rank_0_through_a_folder(tmp_path: Path) -> None:
    results = {}
    for rank in (1, 0):
        environ = _environ(rank)
        info = rank_info(environ, host="n1")
        results[rank] = gather_by_files(info, environ, tmp_path, _part(rank), timeout_s=5)
    assert results[1] is None
    (snapshot,) = results[0].snapshots
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


@each_case(
    "damaged",
    [None, 7, {}, {"error": "cut off"}, {"host_key": "x", "host": "n2", "snapshot": "{", "rank": {}, "unreadable": {}}],
)
def test_a_damaged_part_is_left_out_and_said_so(damaged: object) -> None:
    gathered = join_parts([_part(0), damaged], 2, STEP)
    assert len(gathered.snapshots) == 1
    assert any("damaged" in text for text in gathered.missing)


def _gathered_with(folder: Path, make: Callable[[Path], object], *, timeout_s: float = 0.05) -> Gathered:
    """Return what rank 0 gathers where rank 1 has handed in its part, and something lies in the place of rank 2's."""
    parts = folder / ".ranks-17.0"
    parts.mkdir(exist_ok=True)
    (parts / "rank-00001.json").write_text(json.dumps(_part(1, 3)))
    make(parts / "rank-00002.json")
    environ = {**_environ(0, 3), "SLURM_STEP_NODELIST": "n1"}
    found = gather_by_files(rank_info(environ, host="n1"), environ, folder, _part(0, 3), timeout_s=timeout_s)
    assert found is not None
    return found


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _changed(**changes: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**_part(2, 3), **changes}))


def _with_ranks() -> str:
    document = json.loads(_part(0)["snapshot"])
    facts = _part(1)["rank"]
    return json.dumps({**document, "ranks": {"num": 1, "same": facts, "each": {}}})


@each_case(
    ("make", "reason"),
    [
        (os.mkfifo, "no regular file"),
        (lambda path: path.mkdir(), "no regular file"),
        (lambda path: path.symlink_to("rank-00001.json"), "symbolic link"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (_sparse, "it has more than 1048576 bytes"),
        (_text(""), "not complete JSON"),
        (_text("7"), "expected an object"),
        (_text("[" * 100_000), "not complete JSON"),
        (_text("[" * 900 + "]" * 900), "expected an object"),
        (_changed(rank=float("inf")), "Infinity is not valid JSON"),
        (lambda path: path.write_text(json.dumps(_part(2, 3)).replace('"rank": 2', '"rank": 1e999')), "rank is inf"),
        (lambda path: path.write_text(json.dumps(_part(2, 3)).replace('"rank": 2', '"rank": 2, "rank": 3')), "twice"),
        (lambda path: path.write_text(json.dumps(_part(1))), "they belong to rank 1"),
        (_changed(host=["n1"]), "expected a text"),
        (_changed(unreadable={"a": 5}), "expected a text"),
        (_changed(snapshot="{"), "not complete JSON"),
        (_changed(snapshot=_with_ranks()), "list ranks already"),
    ],
)
def test_a_part_that_cannot_be_used_is_left_out_and_the_others_are_there(
    make: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    gathered = _gathered_with(tmp_path, make)
    (snapshot,) = gathered.snapshots
    assert [rank.rank for rank in snapshot.ranks] == [0, 1]
    (missing,) = gathered.missing
    assert missing.startswith("rank 2's facts cannot be used: ") and reason in missing and "rank-00002.json" in missing
    assert len(missing) < 300 + len(str(tmp_path))


@pytest.mark.root
def test_a_part_that_somebody_else_has_written_is_left_out(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        path.write_text(json.dumps(_part(2, 3)))
        os.chown(path, 65534, 65534)

    gathered = _gathered_with(tmp_path, make)
    assert [rank.rank for rank in gathered.snapshots[0].ranks] == [0, 1]
    assert "they belong to user 65534, not 0" in gathered.missing[0]


def test_a_rank_still_replaces_what_lies_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_in(_: float) -> None:
        environ = _environ(2, 3)
        assert gather_by_files(rank_info(environ, host="n1"), environ, tmp_path, _part(2, 3), timeout_s=1) is None

    monkeypatch.setattr(snapshot.time, "sleep", hand_in)
    gathered = _gathered_with(tmp_path, os.mkfifo, timeout_s=60)
    assert [rank.rank for rank in gathered.snapshots[0].ranks] == [0, 1, 2]
    assert gathered.missing == ()
    assert list(tmp_path.iterdir()) == []


def test_parts_of_ranks_that_the_job_does_not_have_are_not_waited_for_instead(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        for name in ("rank-00003.json", "rank-0000002.json", "rank-99999.json"):
            path.with_name(name).write_text(json.dumps(_part(2, 3)))

    gathered = _gathered_with(tmp_path, make)
    assert gathered.missing == ("1 of 3 ranks did not answer within 0.05 s: 2",)


def test_what_a_job_before_has_left_is_no_answer(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        path.write_text(json.dumps(_part(2, 3)))
        os.utime(path, (1e9, 1e9))

    assert _gathered_with(tmp_path, make).missing == ("1 of 3 ranks did not answer within 0.05 s: 2",)


def test_two_parts_of_one_rank_are_not_both_taken() -> None:
    gathered = join_parts([_part(0), _part(1), _part(1)], 2, STEP)
    assert [rank.rank for rank in gathered.snapshots[0].ranks] == [0, 1]
    assert "a rank's facts are damaged: rank 1 has sent others already" in gathered.missing


def test_a_host_whose_first_rank_is_missing_is_named() -> None:
    gathered = join_parts([{**_part(1), "snapshot": None}], 2, STEP)
    assert gathered.snapshots == ()
    assert "the first rank of n1 did not send the host's facts" in gathered.missing


@each_case(("restarts", "attempt"), [(None, 0), ("2", 2), ("x", 0)])
def test_all_ranks_and_restarts_find_the_same_folder(restarts: str | None, attempt: int) -> None:
    environ = {**STEP, **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
    assert snapshot_folder(environ) == Path(f"runs/17.0-audit/attempt-{attempt}/snapshot")


@each_case(
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


@each_case("text", ["n[1-", "n[a-b]", "n[1-99999999]", "n[1]m[2"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        expand(text)


def test_names_that_no_slurm_has_are_quoted() -> None:
    assert short_list(["n\x1b1", "n2"]) == "n2,n\\x1b1"
    assert exclude_option(["n1;reboot"]) == "--exclude='n1;reboot'"
