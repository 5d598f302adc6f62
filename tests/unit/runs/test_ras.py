"""Reports of NCCL's RAS, as src/ras/client_support.cc prints them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from known_dumps import hung_job, write

from hpcpace.core.errors import TraceError
from hpcpace.hang.rules import find_hang
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import HangKind, JobView
from hpcpace.runs.imports.dump_view import job_view
from hpcpace.runs.imports.dumps import read_dumps
from hpcpace.runs.imports.ras import RasReport, read_ras, with_witness


def report(
    counts: Mapping[int, int], *, missing: Sequence[int] = (), is_dead: bool = True, size: int = 4, comma: str = ","
) -> str:
    """Return a report on one communicator; without the comma, as NCCL 2.28.7 and 2.28.9 write it."""
    ranks = [
        {
            **{"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank},
            "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False},
            "collective_counts": {"Broadcast": 0, "AllReduce": count},
        }
        for rank, count in counts.items()
    ]
    lost = ",\n".join(
        f'        {{\n          "rank": {rank},\n          "host": "10.0.0.1",\n          "pid": {100 + rank},\n'
        f'          "cuda_dev": {rank},\n          "nvml_dev": {rank}{comma}\n          "status": {{\n'
        f'            "unresponsive": true,\n            "considered_dead": {json.dumps(is_dead)}\n          }}\n'
        "        }"
        for rank in missing
    )
    return (
        '{\n  "nccl_version": "2.28.9",\n  "cuda_runtime_version": 12080,\n  "cuda_driver_version": 12080,\n'
        '  "timestamp": "2026-11-24 09:00:00",\n  "communicators_count": 1,\n  "communicators": [\n    {\n'
        f'      "hash": "0x1",\n      "secondary_hash": "0x2:0x3",\n      "size": {size},\n'
        f'      "ranks_count": {len(ranks)},\n      "missing_ranks_count": {len(missing)},\n'
        f'      "ranks": {json.dumps(ranks)},\n      "missing_ranks": [\n{lost}\n      ]\n    }}\n  ],\n'
        '  "ras": {\n    "collection_time_sec": 0.012,\n    "timeouts_count": 0\n  }\n}\n'
    )


def read(tmp_path: Path, text: str) -> RasReport:
    path = tmp_path / "ras.json"
    path.write_text(text)
    return read_ras(path)


def job_of(tmp_path: Path, *, without: int | None = None) -> JobView:
    contents = hung_job()
    contents.pop(f"nccl_trace_rank_{without}", None)
    return job_view(read_dumps([write(tmp_path / "dumps", contents)]))


@pytest.mark.parametrize("comma", [",", ""], ids=["2.29", "2.28.9"])
def test_the_comma_that_nccl_left_out_is_put_in(tmp_path: Path, comma: str) -> None:
    found = read(tmp_path, report({0: 6, 1: 6, 3: 6}, missing=[2], comma=comma))
    (one,) = found.communicators
    dead = [lost.rank for lost in one.missing_ranks if lost.status.considered_dead]
    assert (found.nccl_version, one.size, dead) == ("2.28.9", 4, [2])


def test_a_rank_that_ras_considers_dead_has_gone(tmp_path: Path) -> None:
    ras = read(tmp_path, report({0: 6, 1: 6, 3: 6}, missing=[2]))
    job, told = with_witness(job_of(tmp_path, without=2), ras)
    hang = find_hang(job)
    assert hang is not None
    assert (hang.kind, hang.culprits) == (HangKind.GONE, (2,))
    assert job.ranks[2].end == "dead according to NCCL RAS"
    assert told == ("NCCL RAS (2.28.9) considers rank 2 dead",)


def test_a_rank_that_does_not_answer_has_not_gone_for_that(tmp_path: Path) -> None:
    ras = read(tmp_path, report({0: 6, 1: 6, 3: 6}, missing=[2], is_dead=False))
    job, told = with_witness(job_of(tmp_path), ras)
    assert job.ranks[2].is_gone is None
    assert told == ("NCCL RAS (2.28.9) gets no answer of rank 2",)


def test_a_rank_that_lives_and_one_that_is_dead_each_have_their_own_reason(tmp_path: Path) -> None:
    write(tmp_path / "dumps", hung_job(missing=2))
    (tmp_path / "dumps" / "nccl_trace_rank_1").unlink()
    ras = read(tmp_path, report({0: 6, 2: 5, 3: 6}, missing=[1]))
    job, _ = with_witness(job_view(read_dumps([tmp_path / "dumps"])), ras)
    hang = find_hang(job)
    assert hang is not None
    assert hang.culprits == (1, 2)
    said = describe(hang, job)
    assert "waits for rank 1, which ended (dead according to NCCL RAS), and for rank 2, which never called it" in (
        said.headline
    )
    assert "out-of-memory killer on its host" in said.advice and "rank 2 (py-spy" in said.advice


def test_counts_are_told_and_decide_nothing(tmp_path: Path) -> None:
    job, told = with_witness(job_of(tmp_path), read(tmp_path, report({0: 6, 1: 5, 2: 6, 3: 6})))
    assert told == (
        "NCCL RAS: in a communicator of 4 ranks, AllReduce was called by rank 1 5 times and ranks 0, 2-3 6 times",
    )
    hang = find_hang(job)
    assert hang is not None
    assert hang.culprits == (2,)


def test_a_report_in_which_all_is_well_says_so(tmp_path: Path) -> None:
    told = with_witness(job_of(tmp_path), read(tmp_path, report(dict.fromkeys(range(4), 6))))[1]
    assert told == ("NCCL RAS (2.28.9): all ranks answer, and have called equally many operations",)


def test_without_a_communicator_of_all_ranks_its_ranks_are_not_known(tmp_path: Path) -> None:
    ras = read(tmp_path, report({0: 6, 1: 5}, size=2))
    job = job_of(tmp_path)
    assert with_witness(job, ras) == (
        job,
        ("NCCL RAS has no communicator of all 4 ranks, so that its ranks are not known here",),
    )


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(report({0: 1})) | changes)


@each_case(
    ("old", "new", "reason"),
    [
        ('"pid": 100', f'"pid": {"9" * 3000}', "pid is <an integer of 9966 bits>: expected an integer"),
        ('"pid": 100', f'"pid": {"9" * 1_000_000}', "it is no JSON"),
        ('"pid": 100', '"pid": NaN', "pid is nan: expected an integer"),
        ('"pid": 100', '"pid": true', "pid is True: expected an integer"),
        ('"host": "10.0.0.1"', f'"host": "{"x" * 1_000_000}"', "host is .*: expected a text of length <= 200"),
        ('"host": "10.0.0.1"', '"host": [["x"]]', r"host is \[\['x'\]\]: expected a text"),
        ('"AllReduce": 1', f'"AllReduce": {"9" * 3000}', "AllReduce is <an integer of 9966 bits>: expected an integer"),
        ('"AllReduce": 1', '"AllReduce": -1', "AllReduce is -1: expected an integer >= 0"),
        (
            '"AllReduce": 1',
            ",".join(f'"op{number}": 1' for number in range(33)),
            "collective_counts is .*: expected an object of length <= 32",
        ),
        ('"nccl_version": "2.28.9"', '"nccl_version": 2.28', "nccl_version is 2.28: expected a text"),
        ('"communicators": [', '"communicators": [[],', r"communicators\[0\] is \[\]: expected an object"),
    ],
    ids=lambda _: "",
)
def test_a_value_of_another_kind_or_size_is_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    text = report({0: 1})
    assert old in text
    with pytest.raises(TraceError, match=reason) as refused:
        read(tmp_path, text.replace(old, new))
    assert len(str(refused.value)) < 250 + len(str(tmp_path))


def test_ranks_that_each_count_another_operation_are_refused(tmp_path: Path) -> None:
    """Each operation is compared over all ranks of a communicator."""
    content = json.loads(report(dict.fromkeys(range(40), 1)))
    for number, rank in enumerate(content["communicators"][0]["ranks"]):
        rank["collective_counts"] = {f"op{number}": 1}
    with pytest.raises(TraceError, match="a communicator has more than 32 operations"):
        read(tmp_path, json.dumps(content))


def test_json_of_very_many_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="values, more than"):
        read(tmp_path, "[" + "[]," * (1 << 20) + "[]]")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "ras.json").write_text(report({0: 1}))
        path.symlink_to(tmp_path / "ras.json")
    with pytest.raises(TraceError, match=r"no regular file|symbolic link"):
        read_ras(path)


@each_case(
    "text",
    [
        "",
        "NCCL version 2.28.9 compiled with CUDA 12.8",
        "[]",
        "{}",
        report({0: 1})[:-40],
        _changed(communicators=7),
        _changed(communicators=[{"size": 1, "ranks": [{}], "missing_ranks": []}]),
        _changed(communicators=[{"size": "x", "ranks": [], "missing_ranks": []}]),
        report({0: 1}).replace('"AllReduce": 1', '"AllReduce": "x"'),
        report({0: 1}).replace('"rank": 0', '"rank": -5'),
        report({0: 1}).replace('"rank": 0', f'"rank": {10**12}'),
        report({0: 1}).replace('"size": 4,', '"size": 4'),  # another comma
        "[" * 100_000,
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match=r"ras\.json is no report of NCCL RAS \(.*\); write one with ncclras -f json"):
        read(tmp_path, text)
