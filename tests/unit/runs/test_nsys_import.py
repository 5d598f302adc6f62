"""Exports of Nsight Systems as runs."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports import nsys
from hpcpace.runs.imports.nsys import import_nsys
from hpcpace.trace.schema import Op, Phase

DATA = Path(__file__).parents[2] / "data" / "imports"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


def changed(tmp_path: Path, *statements: str, name: str = "export.sqlite") -> Path:
    """Return a copy of an export after some statements."""
    path = tmp_path / name
    shutil.copy(DATA / "mfu_2gpu_after.sqlite", path)
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


@pytest.mark.parametrize(("name", "count"), [("before", 33), ("after", 31)])
def test_kernels_of_messages_are_as_many_as_sql_counts(name: str, count: int) -> None:
    path = DATA / f"mfu_2gpu_{name}.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        counted = connection.execute(
            f"SELECT count(*) FROM {KERNELS} k JOIN StringIds s ON s.id = k.shortName "
            "WHERE s.value LIKE '%SendRecv%' GROUP BY k.deviceId"
        ).fetchall()
    found = import_nsys(path)
    ours = [int((one.tables["collectives"]["op"] == Op.SEND).sum()) for one in found.ranks]
    assert ours == [count, count] == [row[0] for row in counted]
    assert "steps" in found.source.unknown and "Nsight Systems 2026" in found.source.tool


def test_kernels_of_nccl_that_do_not_say_what_they_do_are_no_work(tmp_path: Path) -> None:
    path = changed(
        tmp_path, "UPDATE StringIds SET value = 'ncclDevKernel_Generic' WHERE value LIKE 'ncclDevKernel_SendRecv%'"
    )
    found = import_nsys(path)
    assert not any(len(one.tables["collectives"]) for one in found.ranks)
    assert any(note.startswith("62 kernels of NCCL left out") for note in found.source.notes)


@each_case(
    ("statement", "note"),
    [
        ("DROP TABLE StringIds", "kernels without a name: any of them may be a collective"),
        ("DELETE FROM StringIds WHERE value LIKE 'ncclDevKernel_SendRecv%'", "62 kernels without a name"),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME", "launches of kernels are not in the files"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME", "launches of kernels are not in the files"),
    ],
)
def test_without_names_or_launches_of_kernels_what_devices_did_is_unknown(
    tmp_path: Path, statement: str, note: str
) -> None:
    assert "what devices did" not in import_nsys(changed(tmp_path, name="whole.sqlite")).source.unknown
    found = import_nsys(changed(tmp_path, statement))
    assert "what devices did" in found.source.unknown
    assert any(note in one for one in found.source.notes)
    assert all(len(one.device_tables) and not len(one.tables["phases"]) for one in found.ranks)


def test_each_gpu_of_a_process_is_a_rank_and_launches_come_before_kernels() -> None:
    first, second = import_nsys(DATA / "mfu_2gpu_after.sqlite").ranks
    assert [one.header.local_rank for one in (first, second)] == [0, 1] and first.header.host == "modal"
    for one in (first, second):
        rows = one.tables["collectives"]
        assert (rows["enqueue_ns"] <= rows["enter_ns"]).all() and (rows["enqueue_ns"] < rows["enter_ns"]).any()


def test_ranges_of_nvtx_become_steps_and_phases(tmp_path: Path) -> None:
    with closing(sqlite3.connect(DATA / "mfu_2gpu_after.sqlite")) as connection:
        ((start, process),) = connection.execute(f"SELECT min(start), globalPid FROM {KERNELS} WHERE deviceId = 0")
    rows = [
        f"INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES ({start + begin}, {start + end}, 59, "
        f"'{text}', {process + 149})"
        for text, begin, end in (
            ("iteration 7", 0, 1000),
            ("train step 8", 1000, 2000),
            ("forward", 1100, 1400),
            ("backward", 1400, 1800),
            ("aten::forward, op_id = 3", 1400, 1800),
        )
    ]
    first, second = import_nsys(changed(tmp_path, *rows)).ranks
    assert first.tables["steps"]["step"].tolist() == [7, 8] and not len(second.tables["steps"])
    assert first.tables["phases"]["phase"].tolist() == [Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.IDLE]
    assert first.tables["phases"]["step"][:2].tolist() == [8, 8]


@each_case(
    ("ranges", "numbers", "num_left_out"),
    [
        ([("iteration", 0, 100), ("step", 1, 99)], [3, 4, 5], 3),
        ([("step", 0, 100), ("micro step", 5, 45), ("micro step", 50, 90)], [3, 4, 5], 6),
        ([("step", 0, 100), ("iteration", 0, 100)], [3, 4, 5], 3),
        ([("step", 0, 90)], [3, 4, 5], 0),
    ],
)
@each_case("is_around", [False, True])
def test_of_ranges_inside_each_other_the_outermost_that_repeat_are_steps(
    tmp_path: Path, ranges: list[tuple[str, int, int]], numbers: list[int], num_left_out: int, is_around: bool
) -> None:
    with closing(sqlite3.connect(DATA / "mfu_2gpu_after.sqlite")) as connection:
        ((start, process),) = connection.execute(f"SELECT min(start), globalPid FROM {KERNELS} WHERE deviceId = 0")
    rows = [
        (f"{name} {number}", start + 100 * number + begin, start + 100 * number + end)
        for number in numbers
        for name, begin, end in ranges
    ]
    rows += [("train iteration 1", start, start + 1000)] * is_around
    statements = [
        f"INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES ({begin}, {end}, 59, '{name}', "
        f"{process + 149})"
        for name, begin, end in rows
    ]
    found = import_nsys(changed(tmp_path, *statements))
    steps = found.ranks[0].tables["steps"]
    assert steps["step"].tolist() == numbers
    assert ((steps["end_ns"] - steps["begin_ns"]) == ranges[0][2] - ranges[0][1]).all()
    said = [int(note.split()[0]) for note in found.source.notes if "inside of steps" in note]
    assert said == [num_left_out + is_around] * bool(num_left_out + is_around)


def test_an_older_schema_without_names_processes_and_ranges_is_read(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        "DROP TABLE NVTX_EVENTS",
        "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "DROP TABLE META_DATA_EXPORT",
        "DROP TABLE TARGET_INFO_SYSTEM_ENV",
        f"ALTER TABLE {KERNELS} DROP COLUMN globalPid",
    )
    found = import_nsys(path)
    assert len(found.ranks) == 2 and found.ranks[0].header.host == "unknown"


def test_a_name_with_characters_of_addresses_is_read(tmp_path: Path) -> None:
    assert len(import_nsys(changed(tmp_path, name="a?mode=rwc#%41 b.sqlite")).ranks) == 2


def test_an_export_is_never_written(tmp_path: Path) -> None:
    path = changed(tmp_path)
    path.chmod(0o444)
    before = path.read_bytes()
    import_nsys(path)
    assert path.read_bytes() == before and sorted(one.name for one in tmp_path.iterdir()) == [path.name]


def _text(path: Path) -> None:
    path.write_text("hello")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def _scribbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:40960] = b"\xa5" * (40960 - 4096)
    path.write_bytes(bytes(content))


def _statements(*statements: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return run


@each_case(
    ("damage", "message"),
    [
        (_text, "no sqlite database"),
        (_cut, "cannot read"),
        (_scribbled, "cannot read|no kernels"),
        (_statements(f"DROP TABLE {KERNELS}"), "has no kernels"),
        (_statements(f"DELETE FROM {KERNELS}"), "nothing ran on a GPU"),
        (_statements(f"UPDATE {KERNELS} SET start = 'soon'"), "values of a kind that no export has"),
        (_statements(f"UPDATE {KERNELS} SET deviceId = 'first'"), "has values of a kind|cannot read"),
        (
            # A view that never ends, in place of a table.
            _statements(
                f"DROP TABLE {KERNELS}",
                f"CREATE VIEW {KERNELS} AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) "
                "SELECT x AS start, x AS end, x AS deviceId, x AS correlationId FROM n",
            ),
            "has no kernels",
        ),
    ],
)
def test_a_damaged_or_hostile_export_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = changed(tmp_path)
    damage(path)
    with pytest.raises(TraceError, match=message):
        import_nsys(path)


def test_more_rows_than_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "MAX_ROWS", 50)
    with pytest.raises(TraceError, match="more rows than 50: export a shorter range"):
        import_nsys(DATA / "mfu_2gpu_after.sqlite")
