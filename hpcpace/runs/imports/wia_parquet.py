"""The columns of a parquet file of the what-if analysis, read within limits of rows, kinds of operations and memory.

A file of some kilobytes can ask for any amount: a text in a dictionary stands for itself in every row, pages of zeros
shrink to nothing, and sizes in the metadata may be wrong. So texts stay in their dictionary, and the decoding runs in a
process with limited memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.text import shown
from hpcpace.runs.imports.bounded import call_bounded
from hpcpace.runs.imports.opened import InputFile

MAX_ROWS = 1_200_000
"""Each takes up to 700 bytes until the run is written."""
MAX_KINDS = 1024
MAX_NAME_LETTERS = 60
_MAX_BYTES = 640 << 20
_TEXT = "optype"


def parquet_table(file: InputFile, columns: tuple[str, ...]) -> pd.DataFrame:
    """Return columns of a parquet file, of numbers but for `optype`, whose texts are cut to `MAX_NAME_LETTERS`.

    Raises:
        UsageError: pyarrow is not installed.
        TraceError: the file cannot be read, is no such trace, or takes more memory than it may.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError("parquet files need pyarrow: pip install 'hpcpace[import]'") from error
    try:
        numbers, codes, names = call_bounded(lambda: _read(file, columns), max_bytes=_MAX_BYTES)
    except MemoryError:
        raise TraceError(
            f"{file.path} has {file.size_bytes} bytes and takes more than {_MAX_BYTES >> 20} MiB to decode, or is"
            " damaged: refused; split it by steps if it is sound"
        ) from None
    # The last name is that of what has none, whose code is -1.
    return pd.DataFrame({**numbers, _TEXT: np.array([*names, None], object)[codes]})


def _read(file: InputFile, columns: tuple[str, ...]) -> tuple[dict[str, Any], Any, list[str | None]]:
    import pyarrow
    from pyarrow import parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        with file.open() as opened:
            metadata = parquet.read_metadata(opened)
            _check_schema(file.path, metadata.schema.to_arrow_schema(), columns)
            _check_rows(file.path, metadata.num_rows)
            table = parquet.ParquetFile(opened, read_dictionary=[_TEXT]).read(columns=list(columns), use_threads=False)
        _check_rows(file.path, table.num_rows)
        text = table.column(_TEXT).unify_dictionaries().combine_chunks()
        if isinstance(text, pyarrow.ChunkedArray):  # of no row
            text = pyarrow.array([], pyarrow.string()).dictionary_encode()
        if len(text.dictionary) > MAX_KINDS:
            raise TraceError(f"{file.path} has {len(text.dictionary)} kinds of operations, more than {MAX_KINDS}")
        names = [name if name is None else name[:MAX_NAME_LETTERS] for name in text.dictionary.to_pylist()]
        codes = text.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        numbers = {name: table.column(name).to_numpy() for name in columns if name != _TEXT}
    except MemoryError:
        raise MemoryError from None  # that of pyarrow would have to be imported to be raised
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"cannot read {file.path}: {shown(str(error))}") from None
    return numbers, codes, names


def _check_rows(path: Path, num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise TraceError(f"{path} has {num_rows} rows, more than {MAX_ROWS}: split it by steps")


def _check_schema(path: Path, schema: Any, columns: tuple[str, ...]) -> None:
    import pyarrow
    from pyarrow import types

    names = schema.names
    missing = [name for name in columns if name not in names]
    if missing:
        raise TraceError(f"{path} lacks the columns {', '.join(missing)}: it is no trace of the what-if analysis")
    for name in columns:
        kind: Any = schema.field(name).type if names.count(name) == 1 else pyarrow.null()
        if name == _TEXT:
            of_text = kind.value_type if types.is_dictionary(kind) else kind
            is_right = types.is_string(of_text) or types.is_large_string(of_text)
        else:
            is_right = types.is_integer(kind) or types.is_floating(kind)
        if not is_right:
            raise TraceError(
                f"{path} has a column {name} of {shown(str(kind))}, not of {'texts' if name == _TEXT else 'numbers'}:"
                " it is no trace of the what-if analysis"
            )
