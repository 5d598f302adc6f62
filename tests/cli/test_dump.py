from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import h5py
import pytest

from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import FORMAT_VERSION, TABLES, TraceHeader

_GOLDEN = Path(__file__).parents[1] / "golden" / f"trace-{FORMAT_VERSION}.h5"
_LARGEST = (1 << 63) - 1


@pytest.fixture
def dump(hpcpace):
    """Run `hpcpace dump` and return its exit code, stdout and stderr."""
    return partial(hpcpace, "dump")


@pytest.fixture
def trace(tmp_path):
    """A trace with a value of the largest size in every column of the widest table."""
    header = TraceHeader(
        run_id="run", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="n\x1b[31m1\udcff\n2"
    )  # fmt: skip
    path = tmp_path / "rank-00000.h5"
    with Recorder(path, header, warn=print) as recorder:
        for _ in range(8):
            recorder.add_host(*[_LARGEST] * 6, (1 << 31) - 1, *[_LARGEST] * 6, *[(1 << 31) - 1] * 4, *[_LARGEST] * 5)
        recorder.add_collective(3, 0, 7, 10, 64, -1, 1 << 20, 1 << 21, 1 << 20, 1)
        recorder.add_group(0, 0, b"[red]\x1b]0;owned\x07\xff", b"gloo")
    return path


def test_a_sound_trace_is_shown_whole_and_exits_with_0(dump):
    code, out, err = dump(_GOLDEN)
    assert (code, err) == (0, "")
    assert f"{_GOLDEN}: closed cleanly" in out
    assert "topology_addr" in out and "spine.leaf1.n1" in out
    for table in TABLES:
        assert f"\n{table}: " in out
    assert "\nphases: 9000 rows" in out
    assert "all_reduce" in out and "forward" in out


def test_only_the_table_and_rows_asked_for_are_shown(dump, trace):
    code, out, _ = dump(trace, "--table", "collectives", "--limit", 3)
    assert code == 0
    assert "collectives: 1 rows" in out and "barrier" in out
    assert "host: 8 rows" not in out
    _, out, _ = dump(trace, "--limit", 0)
    assert "host: 8 rows" in out and str(_LARGEST) not in out


def test_every_value_of_a_wide_table_stands_whole_in_100_columns(dump, trace):
    _, out, _ = dump(trace, "--table", "host")
    lines = out.splitlines()[1:]
    assert max(map(len, lines)) <= 100
    for column in TABLES["host"].dtype.names:
        assert sum(column in line.split() for line in lines) == 1
    assert out.count(str(_LARGEST)) == 17 * 5


def test_control_characters_of_a_file_do_not_reach_the_terminal(dump, trace):
    code, out, _ = dump(trace)
    assert code == 0
    assert "\x1b" not in out and "\x07" not in out
    assert r"n\x1b[31m1\udcff\n2" in out
    assert r"[red]\x1b]0;owned\x07" in out
    out.encode("utf-8")


def test_json_holds_header_rows_and_problems(dump, trace):
    code, out, _ = dump(trace, "--json", "--limit", 2)
    assert code == 0
    content = json.loads(out)
    assert content["header"]["world_size"] == 1
    assert content["closed_cleanly"] is True and content["problems"] == []
    assert content["tables"]["host"]["num_rows"] == 8
    assert [row["rss_bytes"] for row in content["tables"]["host"]["rows"]] == [_LARGEST, _LARGEST]
    (row,) = content["tables"]["collectives"]["rows"]
    assert (row["op"], row["seq"], row["exit_kind"]) == ("barrier", 7, 1)
    assert set(content["tables"]) == {*TABLES, "open_collectives"}


def test_a_trace_with_a_damaged_table_is_shown_with_its_problem_and_exits_with_1(dump, trace):
    with h5py.File(trace, "r+") as file:
        del file["collectives/seq"]
    code, out, err = dump(trace)
    assert (code, err) == (1, "")
    assert "problem: " in out and "table collectives is damaged" in out
    assert "host: 8 rows" in out
    assert dump(trace, "--json")[0] == 1


def test_an_operation_that_never_completed_is_shown(dump, tmp_path, trace):
    recorder = Recorder(
        tmp_path / "live" / "rank-00000.h5",
        TraceHeader(run_id="run", attempt=0, rank=0, world_size=1, local_rank=0, local_size=1, node=0, host="n1"),
        warn=print,
        flush_interval_s=3600.0,
    )
    recorder.open_collectives = lambda: [(3, 0, 7, 0, 64, -1, 1 << 20, 0, 0, 2)]
    recorder.start()
    recorder.flush()
    copy = shutil.copytree(tmp_path / "live", tmp_path / "killed")
    recorder.close()
    code, out, _ = dump(copy / "rank-00000.h5")
    assert code == 0
    assert "not closed: killed, or still running" in out
    assert "open_collectives: 1 rows" in out


@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_a_file_that_cannot_be_read_is_one_line_and_exits_with_2(dump, tmp_path, content):
    path = tmp_path / "rank-00000.h5"
    if content is not None:
        path.write_bytes(content)
    code, out, err = dump(path)
    assert (code, out) == (2, "")
    assert err.startswith("hpcpace: ") and str(path) in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--table", "nothing", _GOLDEN], ["--limit", "-1", _GOLDEN], ["/"]])
def test_wrong_usage_exits_with_2(dump, arguments):
    code, out, err = dump(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    ("owner", "version", "warns"), [(1, (1, 14, 6), True), (0, (1, 14, 6), False), (1, (2, 0, 0), False)]
)
def test_somebody_elses_file_is_read_by_an_old_hdf5_with_a_warning(dump, trace, monkeypatch, owner, version, warns):
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + owner)
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", version)
    _, _, err = dump(trace)
    assert ("has known vulnerabilities: update h5py" in err) == warns
