"""Frames as files: Parquet or CSV, written block by block, so that a run of any length takes little memory.

Files are made with pyarrow, straight from arrays. A file gets its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from hpcpace.core.csv_text import text_cell
from hpcpace.core.errors import UsageError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import check_target
from hpcpace.frames.columns import FRAMES, Columns, Kind, Texts, nothing
from hpcpace.metrics import Ints


class Format(StrEnum):
    """The format of files."""

    PARQUET = "parquet"
    CSV = "csv"


@dataclass(frozen=True, kw_only=True)
class WrittenTable:
    """A file that was written."""

    path: Path
    num_rows: int


def write_tables(
    folder: Path,
    kind: Format,
    tables: Mapping[str, Callable[[], Iterator[Columns]]],
    *,
    step: Ints,
    about: Mapping[str, str],
    begin_stage: Callable[[str], Callable[[int, int], None]],
) -> list[WrittenTable]:
    """Write frames as FOLDER/TABLE.parquet or FOLDER/TABLE.csv; files of these names are replaced.

    Args:
        folder: is made.
        kind: the format.
        tables: by name, what returns the columns block by block.
        step: numbers of the steps, ascending, by which progress is shown.
        about: what Parquet files say of their origin, by key.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.

    Raises:
        UsageError: a file cannot be written, or has the name of a device or of what a run has recorded.
    """
    for name in tables:
        check_target(folder / f"{name}.{kind}", (), "-o")
    written = []
    try:
        with Folder.open(folder, make=True) as opened:
            for name, blocks in tables.items():
                advance = begin_stage(f"writing {name}")
                with opened.writing(f"{name}.{kind}") as file:
                    num_rows = _write(file, kind, name, _with_progress(blocks(), step, advance), about)
                written.append(WrittenTable(path=folder / f"{name}.{kind}", num_rows=num_rows))
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror or error}): name another folder with -o"
        ) from error
    return written


def _with_progress(blocks: Iterator[Columns], step: Ints, advance: Callable[[int, int], None]) -> Iterator[Columns]:
    """Yield blocks, and report how many of the steps are done."""
    for block in blocks:
        yield block
        last = np.asarray(block["step"]).max(initial=-1) if "step" in block else np.iinfo(np.int64).max
        advance(int(np.searchsorted(step, last, side="right")), len(step))


class _Writer(Protocol):
    def write_table(self, table: Any) -> None: ...

    def close(self) -> None: ...


def _write(file: BinaryIO, kind: Format, name: str, blocks: Iterator[Columns], about: Mapping[str, str]) -> int:
    """Write a frame and return its number of rows."""
    schema, num_rows = _schema(name, kind), 0
    schema = schema.with_metadata({f"hpcpace.{key}": value for key, value in about.items()})
    writer = _writer(file, kind, schema)
    try:
        for columns in blocks:
            table = _table(name, kind, columns, schema)
            if len(table):
                writer.write_table(table)
            num_rows += len(table)
        if not num_rows and kind is Format.CSV:
            writer.write_table(_table(name, kind, nothing(name), schema))
    finally:
        writer.close()
    return num_rows


def _writer(file: BinaryIO, kind: Format, schema: Any) -> _Writer:
    from pyarrow import csv, parquet

    made: _Writer
    if kind is Format.CSV:
        made = csv.CSVWriter(file, schema)
    else:
        made = parquet.ParquetWriter(file, schema, compression="zstd")
    return made


def _schema(name: str, kind: Format) -> Any:
    import pyarrow as pa

    text = pa.string() if kind is Format.CSV else pa.dictionary(pa.int32(), pa.string())
    types = {Kind.INT: pa.int64(), Kind.FLOAT: pa.float64(), Kind.BOOL: pa.bool_(), Kind.TEXT: text}
    return pa.schema([pa.field(column.name, types[column.kind]) for column in FRAMES[name]])


def _table(name: str, kind: Format, columns: Columns, schema: Any) -> Any:
    """Return a block as a table; what is not known is null there, and an empty cell in CSV."""
    import pyarrow as pa

    arrays = []
    for column in FRAMES[name]:
        values = columns[column.name]
        if not isinstance(values, Texts):
            arrays.append(pa.array(np.asarray(values, column.kind), from_pandas=column.kind is Kind.FLOAT))
            continue
        names = [text_cell(text) for text in values.names] if kind is Format.CSV else list(values.names)
        codes = pa.array(values.code.astype(np.int32), mask=values.code < 0)
        array = pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))
        arrays.append(array.cast(pa.string()) if kind is Format.CSV else array)
    return pa.Table.from_arrays(arrays, schema=schema)
