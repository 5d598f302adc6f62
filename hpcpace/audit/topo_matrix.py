"""The matrix of `nvidia-smi topo -m`, or of `rocm-smi --showtopo`, as text: links between GPUs, and paths to adapters.

All versions are read: adapters as mlx5_0 or as NIC0 with a legend, with or without CPU and NUMA affinity, with tabs or
pasted with spaces, in colours, several hosts in one file with the prefixes of pdsh or srun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcpace.audit import cpusets
from hpcpace.core.errors import UsageError
from hpcpace.core.log_text import log_lines, without_colours
from hpcpace.core.text import printable

_MAX_DEVICES = 512
_MAX_LINES = 100_000
_HOST = re.compile(r"^\s*(?:\[?([A-Za-z0-9_.\-]+)\]?:)[ \t](?=.*(GPU\d|NIC\d|mlx|X|Legend|=|$))")
_GPU = re.compile(r"GPU(\d{1,3})")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CELL = re.compile(r"X|SELF|NV\d{1,3}|NV#|PIX|PXB|PHB|NODE|SYS|SOC|XGMI|PCIE|DIS|NS|N/A|OK", re.IGNORECASE)
_LEGEND = re.compile(r"^\s*(NIC\d{1,3}) ?: ?(\S{1,60})\s*$")
_CUT = "the matrix is cut or wrapped, save it again with nvidia-smi topo -m > FILE"


@dataclass(frozen=True, kw_only=True)
class TopoMatrix:
    """The matrix of one host.

    Attributes:
        host: its name, where the text has it as a prefix; else empty.
        source: file and line of its header.
        columns: what the header names.
        paths: class by row and column, like `NV18`, `PIX`, `SYS`, `XGMI`; `SOC` of old drivers is `SYS`.
        cpus: CPUs near each GPU; None where the text does not say, 0 where it says that there are none.
        names: what NIC0 and so on are.
        lines: the line of each GPU as it was read.
    """

    host: str
    source: str
    columns: tuple[str, ...] = ()
    paths: dict[str, dict[str, str]] = field(default_factory=dict)
    cpus: dict[str, int | None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        """The GPUs, in the order of their numbers."""
        return [name for name in self.paths if _GPU.fullmatch(name)]

    @property
    def nics(self) -> list[str]:
        """The adapters that the GPUs have a path to."""
        columns = next((self.paths[gpu] for gpu in self.gpus), {})
        return [name for name in columns if not _GPU.fullmatch(name)]

    def num_links(self, gpu: str, other: str) -> int:
        """Return the number of NVLinks between two GPUs; 1 for XGMI, whose number is not printed."""
        path = self.paths[gpu].get(other, "")
        return 1 if path == "XGMI" else int(path[2:]) if re.fullmatch(r"NV\d+", path) else 0


def read_topo(*paths: Path) -> tuple[TopoMatrix, ...]:
    """Return the matrices in some files.

    Raises:
        UsageError: a file cannot be read, has no matrix, or one whose rows do not fit its header.
    """
    made: list[TopoMatrix] = []
    for path in paths:
        try:
            lines = [
                (number, without_colours(line).decode("utf-8", "replace")) for number, line in _bounded(log_lines(path))
            ]
        except (OSError, EOFError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read --topo {path}: {printable(reason)}") from error
        found = list(_matrices(path, lines))
        if not found:
            raise UsageError(f"{path} has no matrix of GPUs: save the output of nvidia-smi topo -m in it")
        made += found
    return tuple(made)


def _bounded(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    for count, line in enumerate(lines):
        if count > _MAX_LINES:
            raise ValueError(f"more than {_MAX_LINES} lines")
        yield line


def _matrices(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[TopoMatrix]:
    """Yield the matrices of a file that have links; those of weights and hops have numbers only."""
    made: dict[str, list[TopoMatrix]] = {}
    for number, raw in lines:
        text = raw.lstrip("\ufeff").rstrip("\r\n")
        prefix = _HOST.match(text)
        host = prefix[1] if prefix and not _LEGEND.match(text) else ""
        text = text[prefix.end() :] if prefix and host else text
        columns = _header(text)
        if columns:
            made.setdefault(host, []).append(
                TopoMatrix(host=printable(host), source=f"{path.name}:{number}", columns=tuple(columns))
            )
        elif found := _LEGEND.match(text):
            for matrix in made.get(host, [])[-1:]:
                matrix.names[found[1]] = printable(found[2])
        elif host in made:
            _row(made[host][-1], text, f"{path.name}:{number}")
    for matrix in (matrix for matrices in made.values() for matrix in matrices if matrix.gpus):
        missing = [name for name in matrix.columns if _GPU.fullmatch(name) and name not in matrix.paths]
        if missing:
            raise UsageError(f"{matrix.source}: {missing[0]} has no row: {_CUT}")
        yield matrix


def _header(text: str) -> list[str]:
    """Return the columns of a header; empty if the line is none."""
    if not re.match(r"\s*GPU\d{1,3}(\s|$)", text):
        return []
    rest = text
    found = []
    for name in _AFFINITY:
        rest, count = re.subn(name.replace(" ", r"\s+"), " ", rest)
        found += [name] * (count > 0)
    devices = rest.split()
    if any(_CELL.fullmatch(word) or re.fullmatch(r"[\d,\-]+", word) for word in devices) or len(devices) > _MAX_DEVICES:
        return []
    return [*devices, *found]


def _row(matrix: TopoMatrix, text: str, place: str) -> None:
    """Add a row; lines that are none are passed over.

    Raises:
        UsageError: it is one, and has another number of devices than the header.
    """
    devices = [name for name in matrix.columns if name not in _AFFINITY]
    words = text.split()
    if not words or words[0] not in devices or len(words) < 2 or not _CELL.fullmatch(words[1]):
        # rocm-smi has a row for each GPU, with 0 for itself.
        if not words or words[0] not in devices or len(words) != len(devices) + 1 or "0" not in words[1:]:
            return
        if all(word.isdigit() for word in words[1:]):
            return
    cells = words[1 : len(devices) + 1]
    if len(cells) < len(devices) or not all(_CELL.fullmatch(cell) or cell == "0" for cell in cells):
        count = sum(bool(_CELL.fullmatch(cell)) for cell in cells)
        raise UsageError(f"{place}: {words[0]} has {count} of {len(devices)} paths: {_CUT}")
    name = words[0]
    matrix.paths[name] = {
        device: cell.upper().replace("SOC", "SYS")
        for device, cell in zip(devices, cells, strict=True)
        if device != name
    }
    if not _GPU.fullmatch(name):
        return
    matrix.lines[name] = f"{place}: {printable(' '.join(words))[:200]}"
    near = _near(
        text, words[len(devices) + 1 :], [column for column in matrix.columns if column in _AFFINITY], len(devices)
    )
    if "CPU Affinity" in near:
        matrix.cpus[name] = _cpus(near["CPU Affinity"])


def _near(text: str, words: Sequence[str], columns: Sequence[str], num_devices: int) -> dict[str, str]:
    """Return the affinities of a row: by tabs where there are any, since cells may be empty; else by their number."""
    cells = [cell.strip() for cell in text.rstrip("\t ").split("\t")]
    if len(cells) > num_devices:
        values = cells[num_devices + 1 :]
        return {name: values[place] if place < len(values) else "" for place, name in enumerate(columns)}
    return dict(zip(columns, words, strict=True)) if len(words) == len(columns) else {}


def _cpus(text: str) -> int | None:
    if text in ("", "N/A"):
        return 0
    try:
        return cpusets.parse_list(text)
    except ValueError:
        return None
