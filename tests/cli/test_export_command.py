"""`hpcpace export`: what it writes is what frames have, complete or not at all."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcpace as package
from experiments.synthetic_run import SyntheticRun
from hpcpace.frames import columns
from hpcpace.frames.columns import FRAMES, TABLES, Columns

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    return SyntheticRun(num_ranks=4, hosts=("=1+1", "n2"), slow={3: 1.3}, noise=0.02).write(path).path


def test_parquet_has_all_frames_with_their_types(hpcpace, run: Path, tmp_path: Path) -> None:
    code, out, err = hpcpace("export", run, "-o", tmp_path / "new" / "data")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path / "new" / "data")) == sorted(f"{table}.parquet" for table in TABLES)
    assert f"written: {tmp_path}/new/data/steps.parquet (152 rows)" in out
    loaded = package.load(run)
    for table in TABLES:
        read = pd.read_parquet(tmp_path / "new" / "data" / f"{table}.parquet")
        frame = getattr(loaded, table)
        if len(frame):
            pd.testing.assert_frame_equal(read, frame, check_categorical=False)
        else:
            assert list(read) == list(frame) and read.dtypes.equals(frame.dtypes)


def test_csv_has_some_steps_and_ranks_and_no_formula(hpcpace, run: Path, tmp_path: Path) -> None:
    words = ("--format", "csv", "--only", "ranks", "--only", "collectives", "--steps", "10:12", "--ranks", "0,3")
    code, _, err = hpcpace("export", run, "-o", tmp_path, *words)
    assert (code, err, sorted(os.listdir(tmp_path))) == (0, "", ["collectives.csv", "ranks.csv"])
    rows = {name: _rows(tmp_path / f"{name}.csv") for name in ("ranks", "collectives")}
    assert [row["host"] for row in rows["ranks"]] == ["'=1+1", "n2"]
    assert [(row["rank"], row["step"], row["op"]) for row in rows["collectives"]] == [
        (rank, step, "all_reduce") for rank in "03" for step in ("10", "11")
    ]
    assert list(rows["collectives"][0]) == [column.name for column in FRAMES["collectives"]]
    assert float(rows["collectives"][0]["wait_ns"]) > 1e6


def test_what_a_run_lacks_is_a_warning_and_empty_cells(hpcpace, tmp_path: Path) -> None:
    lacking = SyntheticRun(num_ranks=4, missing=(1,)).write(tmp_path / "run").path
    words = ("--format", "csv", "--only", "collectives", "--only", "audit")
    code, _, err = hpcpace("export", lacking, "-o", tmp_path / "data", *words)
    assert code == 1 and "hpcpace: warning: rank 1 left no trace" in err
    rows = _rows(tmp_path / "data" / "collectives.csv")
    assert {row["wait_ns"] for row in rows} == {""} and rows[0]["duration_ns"] != ""
    assert (tmp_path / "data" / "audit.csv").read_text().splitlines() == [
        ",".join(f'"{column.name}"' for column in FRAMES["audit"])
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none", "-o", "data"), "no run directory at none"),
        (("run",), "Missing option '-o'"),
        (("run", "-o", "data", "--only", "flops"), "'flops' is not one of"),
        (("run", "-o", "data", "--format", "xls"), "'xls' is not one of"),
        (("run", "-o", "data", "--attempt", "3"), "no attempt 3"),
        (("run", "-o", "data", "--steps", "900:"), "none of the 38 steps that a report uses, 2 to 39"),
        (("run", "-o", "data", "--ranks", "2-5"), "names ranks 4-5, and the figures of this run have ranks 0-3"),
        (("run", "-o", "file", "--only", "ranks"), "cannot write to file"),
        (("run", "-o", "/proc/data", "--only", "ranks"), "cannot write to /proc/data"),
        (("run", "-o", "device", "--only", "ranks"), "it is a device, pipe or socket"),
    ],
)
def test_bad_input_is_one_clear_error(
    hpcpace, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(run)
    Path("file").write_text("kept")
    Path("device").mkdir()
    os.mkfifo("device/ranks.parquet")
    code, out, err = hpcpace("export", *words)
    assert (code, out) == (2, "") and says in " ".join(err.split())
    assert Path("file").read_text() == "kept" and not Path("data").exists()


def test_a_run_without_steps_makes_no_file(hpcpace, tmp_path: Path) -> None:
    short = SyntheticRun(num_ranks=2, num_steps=2, num_warmup=2).write(tmp_path / "short").path
    code, _, err = hpcpace("export", short, "-o", tmp_path / "none")
    assert (code, (tmp_path / "none").exists()) == (3, False) and "none of the 2 common steps" in err


def test_a_file_is_complete_or_as_it_was(hpcpace, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.parquet").write_text("before")
    make, calls = columns._table, []

    def fails(name: str, kind: columns.Format, columns: Columns, schema: Any) -> Any:
        calls.append(name)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return make(name, kind, columns, schema)

    monkeypatch.setattr("hpcpace.frames.tables._CELLS", 16)
    monkeypatch.setattr(columns, "_table", fails)
    code, _, err = hpcpace("export", run, "-o", tmp_path, "--only", "steps")
    assert code == 2 and f"cannot write to {tmp_path} (No space left on device)" in err
    assert ((tmp_path / "steps.parquet").read_text(), len(list(tmp_path.iterdir()))) == ("before", 1)


def test_without_pyarrow_the_package_is_named_and_nothing_is_read(
    hpcpace, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = hpcpace("export", run, "-o", tmp_path / "data")
    assert (code, err) == (2, "hpcpace: pyarrow is not installed: pip install 'hpcpace[frames]'\n")


def test_progress_advances_with_the_steps(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.frames.tables._CELLS", 40)
    told: list[tuple[int, int]] = []
    loaded = package.load(run)
    monkeypatch.setattr(loaded._source, "begin_stage", lambda name: lambda done, total: told.append((done, total)))
    _ = loaded.steps  # what reading and measuring tell is not meant here
    told.clear()
    loaded.to_csv(tmp_path, only=["steps"])
    assert told == [(done, 38) for done in (10, 20, 30, 38)]
