"""The columns of each frame (names, types and meanings, as in docs/frames.md), and frames as Parquet or CSV.

Times are nanoseconds on the common clock since the first of the loaded steps began on any rank. What cannot be known is
NaN, so a column of times or durations that may lack some is float64, which is exact below 104 days.

Files are made with pyarrow, straight from arrays. A file gets its name when it is complete.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError, check_package
from hpcpace.core.exposition import text_cell
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import check_target
from hpcpace.metrics import Ints

if TYPE_CHECKING:
    from pandas import DataFrame


class ColumnType(StrEnum):
    """The type of a column as pandas names it; `text` is a category in frames and a string in files."""

    INT = "int64"
    FLOAT = "float64"
    BOOL = "bool"
    TEXT = "category"


@dataclass(frozen=True)
class Column:
    """One column of a frame."""

    name: str
    kind: ColumnType
    meaning: str


@dataclass(frozen=True)
class Texts:
    """A column of texts, each text only once.

    Attributes:
        names: the texts.
        code: index into `names` of each row, -1 for none, int64, (num_rows,).
    """

    names: tuple[str, ...]
    code: Ints

    def __len__(self) -> int:
        return len(self.code)


Values = NDArray[Any] | Texts
Columns = Mapping[str, Values]
"""The values of a frame by column, all of one length."""


FRAMES: Mapping[str, tuple[Column, ...]] = {
    table: tuple(Column(name, ColumnType[kind.upper()], meaning) for name, (kind, meaning) in columns.items())
    for table, columns in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""The columns of each frame, in their order; rows have the index 0, 1, 2 ..."""
TABLES = tuple(FRAMES)


def texts_of(values: list[str]) -> Texts:
    """Return a column of texts."""
    names, code = np.unique(np.array(values, dtype=object), return_inverse=True) if values else ((), np.zeros(0, int))
    return Texts(tuple(str(name) for name in names), np.asarray(code, np.int64))


def nothing(table: str) -> dict[str, Values]:
    """Return the columns of a frame without rows."""
    empty = np.zeros(0, np.int64)
    return {c.name: Texts((), empty) if c.kind is ColumnType.TEXT else empty.astype(c.kind) for c in FRAMES[table]}


def joined(table: str, blocks: Iterable[Columns]) -> Columns:
    """Return the rows of all blocks of a frame."""
    parts = [nothing(table), *blocks]
    return {column.name: _joined([part[column.name] for part in parts], column) for column in FRAMES[table]}


def _joined(parts: Sequence[Values], column: Column) -> Values:
    texts = [part for part in parts if isinstance(part, Texts)]
    if not texts:
        return np.concatenate([np.asarray(part, column.kind) for part in parts])
    number: dict[str, int] = {}
    codes = []
    for part in texts:
        of_part = np.array([*(number.setdefault(name, len(number)) for name in part.names), -1], np.int64)
        codes.append(of_part[part.code])
    return Texts(tuple(number), np.concatenate(codes))


def frame_of(table: str, columns: Columns) -> DataFrame:
    """Return columns as a frame of pandas with the types and the order of `FRAMES`.

    Raises:
        UsageError: pandas is not installed.
    """
    check_package("pandas", extra="frames")
    import pandas as pd

    made: dict[str, Any] = {}
    for column in FRAMES[table]:
        values = columns[column.name]
        if isinstance(values, Texts):
            made[column.name] = pd.Categorical.from_codes(values.code, list(values.names))
        else:
            made[column.name] = np.asarray(values, column.kind)
    return pd.DataFrame(made)


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
    types = {
        ColumnType.INT: pa.int64(),
        ColumnType.FLOAT: pa.float64(),
        ColumnType.BOOL: pa.bool_(),
        ColumnType.TEXT: text,
    }
    return pa.schema([pa.field(column.name, types[column.kind]) for column in FRAMES[name]])


def _table(name: str, kind: Format, columns: Columns, schema: Any) -> Any:
    """Return a block as a table; what is not known is null there, and an empty cell in CSV."""
    import pyarrow as pa

    arrays = []
    for column in FRAMES[name]:
        values = columns[column.name]
        if not isinstance(values, Texts):
            arrays.append(pa.array(np.asarray(values, column.kind), from_pandas=column.kind is ColumnType.FLOAT))
            continue
        names = [text_cell(text) for text in values.names] if kind is Format.CSV else list(values.names)
        codes = pa.array(values.code.astype(np.int32), mask=values.code < 0)
        array = pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))
        arrays.append(array.cast(pa.string()) if kind is Format.CSV else array)
    return pa.Table.from_arrays(arrays, schema=schema)
