"""The golden file freezes the version of the trace format: what it means to the reader, and how it is laid out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each_case
from rows import ADDERS, assert_table, header

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import FORMAT_VERSION, TABLES, header_values, round_times, row_dtypes

_GOLDEN = Path(__file__).parents[2] / "golden" / f"trace-{FORMAT_VERSION}.h5"


def test_the_version_has_a_golden_file_with_all_columns():
    assert _GOLDEN.exists(), "FORMAT_VERSION is new: run .venv/bin/python tests/golden/make_trace.py"
    with h5py.File(_GOLDEN, "r") as file:
        has = {f"{table}/{column}" for table in file for column in file[table]}
    wanted = {f"{table.name}/{column}" for table in TABLES.values() for column in table.dtype.names or ()}
    assert has == wanted, "columns differ from those of this version: raise FORMAT_VERSION in hpcpace/trace/schema.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_trace", _GOLDEN.with_name("make_trace.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Notes:
    """Stands in the recorder's place and notes the rows."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in ADDERS}
        for table, name in ADDERS.items():
            setattr(self, name, lambda *row, table=table: self.rows[table].append(row))

    def __enter__(self) -> _Notes:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_golden_file_reads_as_the_rows_that_its_script_recorded(script, monkeypatch):
    noted: list[_Notes] = []
    monkeypatch.setattr(script, "Recorder", lambda *_, **__: noted.append(_Notes()) or noted[0])
    script.write(Path("unused"))
    trace = read_trace(_GOLDEN)
    assert (trace.problems, trace.closed_cleanly, len(trace.open_collectives)) == ((), True, 0)
    assert set(trace.tables) == set(TABLES)
    for table, rows in noted[0].rows.items():
        expected = np.array(rows, dtype=row_dtypes()[table])
        round_times(table, expected)
        assert_table(trace.tables[table], expected)
    account = trace.tables["account"]
    assert set(account["time_ns"].tolist()) == {5_000_000_000}
    assert account["events"].sum() == sum(map(len, noted[0].rows.values()))
    assert account["dropped"].sum() == 0


def _earlier_versions() -> list[str]:
    major, _, minor = FORMAT_VERSION.partition(".")
    return [f"{major}.{earlier}" for earlier in range(int(minor))]


@each_case("version", _earlier_versions())
def test_a_file_of_an_earlier_version_reads_without_later_tables_and_with_zeros_in_later_columns(version):
    path = _GOLDEN.with_name(f"trace-{version}.h5")
    trace, today = read_trace(path), read_trace(_GOLDEN)
    assert (trace.problems, trace.header.format_version) == ((), version)
    with h5py.File(path, "r") as file:
        has = {table: set(file[table]) for table in TABLES if table in file}
    assert {table for table in TABLES if len(trace.tables[table])} == set(has)
    for table in has.keys() - {"account"}:
        for name, values in today.tables[table].items():
            expected = values if name in has[table] else np.zeros_like(values)
            assert np.array_equal(trace.tables[table][name], expected), (table, name)


def test_todays_writer_lays_out_the_golden_file(script, tmp_path):
    script.write(tmp_path / "today.h5")
    assert _layout(tmp_path / "today.h5") == _layout(_GOLDEN)


def test_the_root_attributes_are_the_header():
    trace = read_trace(_GOLDEN)
    assert trace.header == header()
    with h5py.File(_GOLDEN, "r") as file:
        found = {**file.attrs, "samples_unit": file["steps"].attrs["samples_unit"]}
        found["interfaces"] = file["network"].attrs["interfaces"].tolist()
    assert found == header_values(header())


@each_case("table", TABLES.values(), ids=list(TABLES))
def test_a_table_is_a_group_of_chunked_columns(table):
    with h5py.File(_GOLDEN, "r") as file:
        group = file[table.name]
        assert set(group) == set(table.dtype.names)
        for name in table.dtype.names:
            column = group[name]
            enum = table.enums.get(name)
            names = enum and {member.name.lower(): member.value for member in enum}
            assert (column.dtype, h5py.check_enum_dtype(column.dtype)) == (table.dtype[name], names)
            assert (column.ndim, column.maxshape, column.chunks) == (1, (None,), (table.chunk_rows,))
            assert (column.compression, column.shuffle) == ("gzip", True)


def _layout(path: Path) -> dict[str, Any]:
    """Every name in a file, with type and attributes, and the values of all but the recorder's cost."""
    found: dict[str, Any] = {"/": _attributes(path)}

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        found[name] = {key: np.asarray(value).tolist() for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            values = None if name == "account/cost_ns" else item[:].tolist()
            found[name] |= {"dtype": item.dtype, "enum": h5py.check_enum_dtype(item.dtype), "chunks": item.chunks}
            found[name] |= {"values": values}

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


def _attributes(path: Path) -> dict[str, Any]:
    with h5py.File(path, "r") as file:
        return dict(file.attrs)
