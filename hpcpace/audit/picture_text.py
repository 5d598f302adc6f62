"""A picture of the machine in a terminal of 80 columns, in ASCII, and as SVG and an HTML page.

Everything from a snapshot is escaped.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product

from hpcpace.audit import cpusets
from hpcpace.audit.facts import parsed
from hpcpace.audit.findings import CANNOT_DETERMINE, hosts_text
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.picture import DrawnCores, DrawnDevice, DrawnNode, DrawnPackage, Picture, links_of, ranks_text
from hpcpace.audit.rulebook import PathMatrix
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable, shortened

WIDTH = 80
_INSIDE = WIDTH - 4
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MAX_STRIP = 64
_MAX_GROUPS = 24
_MAX_NOTES = 6
_MAX_MAP_COLUMNS = 64
LEGEND = (
    "[...] has a letter for each core: its rank (modulo 36), * for several ranks, . for none",
    "in part: on some hardware threads of these cores only; links as `nvidia-smi topo -m` has them",
)


def picture_lines(picture: Picture) -> Iterator[str]:
    """Yield a picture, at most 80 columns wide."""
    yield shortened(picture.title, max_letters=WIDTH)
    yield shortened(f"  {picture.subtitle}", max_letters=WIDTH)
    for package in picture.packages:
        yield shortened(f"+-- {package.title} ", max_letters=WIDTH - 1).ljust(WIDTH - 1, "-") + "+"
        for line in _package_lines(package):
            yield f"| {shortened(line, max_letters=_INSIDE).ljust(_INSIDE)} |"
    if picture.packages:
        yield "+" + "-" * (WIDTH - 2) + "+"
    for title in picture.elsewhere:
        yield shortened(f"  {title}, no CPUs", max_letters=WIDTH)
    if picture.unplaced:
        yield "  Where these are is not known:"
        for device in picture.unplaced:
            yield shortened(f"  {_device_line(device)}", max_letters=WIDTH)
    yield from _link_lines(picture)
    for note in picture.notes[:_MAX_NOTES]:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if len(picture.notes) > _MAX_NOTES:
        yield f"  {len(picture.notes) - _MAX_NOTES} more facts are not known"


def _package_lines(package: DrawnPackage) -> Iterator[str]:
    for node in package.nodes:
        yield f"{node.title}{f'  {node.caches}' if node.caches else ''}"
        yield from _strip_lines(node)
        for group in node.groups[:_MAX_GROUPS]:
            yield _group_line(group)
        if len(node.groups) > _MAX_GROUPS:
            yield f"  {len(node.groups) - _MAX_GROUPS} more groups of cores"
        for device in node.devices:
            yield _device_line(device)


def _strip_lines(node: DrawnNode) -> Iterator[str]:
    """Yield a letter per core; nothing where no rank may run."""
    strip = "".join(_mark(group) * len(group.cores) for group in node.groups)
    if strip.strip("."):
        for line in textwrap.wrap(strip, _MAX_STRIP):
            yield f"  [{line}]"


def _mark(group: DrawnCores) -> str:
    ranks = {*group.ranks, *group.partly}
    return "." if not ranks else "*" if len(ranks) > 1 else _MARKS[next(iter(ranks)) % len(_MARKS)]


def _group_line(group: DrawnCores) -> str:
    threads = group.cores[0].bit_count()
    what = f"{len(group.cores)} core{'s' if len(group.cores) > 1 else ''}"
    who = group.ranks_text
    cpus = shortened(f"CPUs {group.cpus}", max_letters=32)
    return f"  {what:<9} {cpus:<32} {f'{threads} threads' if threads > 1 else '':<10} {who}".rstrip()


def _device_line(device: DrawnDevice) -> str:
    line = f"  {shortened(device.name, max_letters=12):<12} {device.address}  {device.detail}"
    return f"{shortened(line, max_letters=62):<62} {ranks_text(device.ranks)}".rstrip()


def _link_lines(picture: Picture) -> Iterator[str]:
    for title, rows, columns in links_of(picture):
        found = {picture.links[one, other] for one in rows for other in columns if one != other}
        if len(found) == 1 and len(rows) > 1:
            yield f"Links, {title}: {found.pop()} between all"
        else:
            yield f"Links, {title}:"
            yield from _table_lines(rows, columns, picture.links)


def matrix_lines(matrices: Sequence[PathMatrix], all_hosts: Sequence[str]) -> Iterator[str]:
    """Yield the class of the path of each GPU to each adapter; as `NODE/PHB` where NCCL uses another class."""
    if not matrices:
        yield "no path matrix: there is no GPU or no adapter, or PCI cannot be read"
    for matrix in matrices:
        where = hosts_text(matrix.hosts, all_hosts)
        yield f"GPU x adapter, physical/NCCL{f' ({where})' if where else ''}"
        rows, columns = ([printable(name) for name in names] for names in (matrix.gpus, matrix.nics))
        classes = zip(chain(*matrix.class_physical), chain(*matrix.class_nccl), strict=True)
        cells = (one if one == other else f"{one}/{other}" for one, other in classes)
        yield from _table_lines(rows, columns, dict(zip(product(rows, columns), cells, strict=True)))


def _table_lines(rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield a table, or several below each other where one is too wide; a name has no cell with itself."""
    first = max(map(len, rows))
    width = max(map(len, (*columns, *cells.values(), "NODE"))) + 1
    each = max(1, (WIDTH - 2 - first) // width)
    for start in range(0, len(columns), each):
        shown = columns[start : start + each]
        yield f"  {'':<{first}}{''.join(f'{name:>{width}}' for name in shown)}"
        for row in rows:
            classes = (cells.get((row, name), "X") for name in shown)
            yield f"  {row:<{first}}{''.join(f'{one:>{width}}' for one in classes)}"


def map_lines(job: AuditedJob) -> Iterator[str]:
    """Yield for each host which cores each rank may run on: `#` all cores of a column, `+` some, `.` none."""
    for host in job.hosts:
        yield printable(f"{host.name}: rank x core, | separates NUMA nodes")
        try:
            yield from _map_of(host)
        except Unreadable as error:
            yield printable(f"  {CANNOT_DETERMINE}{host.explain(error)}")


def _map_of(host: AuditedHost) -> Iterator[str]:
    view = host.hardware
    cores = sorted(view.cores, key=lambda core: core & -core)
    by_node = [[core for core in cores if core & cpus] for _, cpus in sorted(view.numa_cpus.items())]
    each = max(1, -(-len(cores) // _MAX_MAP_COLUMNS))
    if each > 1:
        yield f"  each column is {each} cores"
    for rank in host.ranks:
        mask = parsed(rank.cpus, "the CPUs of a rank")
        parts = ("".join(_used(own[at : at + each], mask) for at in range(0, len(own), each)) for own in by_node)
        yield f"  rank {rank.rank:<5} {'|'.join(parts)}  {cpusets.format_list(mask)}"
    if not host.ranks:
        yield "  no ranks"


def _used(cores: Sequence[int], mask: int) -> str:
    used = sum(1 for core in cores if core & mask)
    return "." if not used else "#" if used == len(cores) else "+"


_WIDTH = 1120
_GAP = 16
_LINE = 18
_CELL = 16
_MAX_CELLS = 1_024
_MAX_LINES = 16
_NUM_COLORS = 8
_LETTER = 6.6
"""Width of a letter in pixels, at the size of most texts."""

_NEAR = {"PIX": "near", "PXB": "near", "PHB": "middle", "NODE": "middle", "SYS": "far"}
_STYLE = """
.show { --page:#fff; --box:#f5f5f2; --inner:#fff; --ink:#1b1f23; --muted:#5a636b; --rule:#c9c9c2; --none:#dcdcd6;
  --many:#3d3d3d; --near:#cfe8dd; --middle:#f6e6bb; --far:#f3cbb8; --r0:#0072b2; --r1:#d55e00; --r2:#00845f;
  --r3:#b65a95; --r4:#b98300; --r5:#3f93c9; --r6:#7d4fa8; --r7:#8a8d91;
  font:12px system-ui,"Segoe UI",Roboto,"Liberation Sans",sans-serif; background:var(--page); fill:var(--ink) }
@media (prefers-color-scheme: dark) { .show { --page:#14171a; --box:#1c2024; --inner:#262b30; --ink:#e9eaeb;
  --muted:#a3abb2; --rule:#4a5158; --none:#3a4046; --many:#d5d5d5; --near:#1f4a3b; --middle:#574715; --far:#5e2f1c } }
.show .head { font-size:17px; font-weight:650 } .show .name { font-weight:650 } .show .muted { fill:var(--muted) }
.show .box { fill:var(--box); stroke:var(--rule) } .show .inner { fill:var(--inner); stroke:var(--rule) }
.show .none { fill:var(--none) } .show .many { fill:var(--many) } .show .cell { text-anchor:middle }
.show .near { fill:var(--near) } .show .middle { fill:var(--middle) } .show .far { fill:var(--far) }
""" + "".join(f".show .r{number} {{ fill:var(--r{number}) }}\n" for number in range(_NUM_COLORS))


def svg(drawn: Sequence[Picture]) -> str:
    """Return pictures below each other as one SVG document."""
    sheet = _Sheet()
    bottom: float = _GAP
    for picture in drawn:
        bottom = _draw(sheet, picture, bottom) + _GAP
    label = _escaped("; ".join(picture.title for picture in drawn)[:200])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="show" role="img" aria-label="{label}" width="{_WIDTH}" '
        f'height="{bottom:.0f}" viewBox="0 0 {_WIDTH} {bottom:.0f}"><style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" style="fill:var(--page)"/>\n' + "\n".join(sheet.parts) + "\n</svg>\n"
    )


class _Sheet:
    """The elements drawn so far."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        inside = f"<title>{_escaped(title)}</title>" if title else ""
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2">'
            f"{inside}</rect>"
        )

    def text(self, x: float, y: float, text: str, kind: str = "", width: float = _WIDTH) -> None:
        """Write a line, cut to what fits into a width in pixels."""
        most = max(4, int(width / _LETTER))
        shown = text if len(text) <= most else f"{text[: most - 3]}..."
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{_escaped(shown)}</text>')


def _escaped(text: str) -> str:
    return "\n".join(html.escape(printable(line)) for line in text.split("\n"))


def _draw(sheet: _Sheet, picture: Picture, y: float) -> float:
    """Draw a picture from y on, and return where it ends."""
    sheet.text(_GAP, y + 16, picture.title, "head")
    sheet.text(_GAP, y + 36, picture.subtitle, "muted")
    y += 48
    num_cores = sum(len(group.cores) for package in picture.packages for node in package.nodes for group in node.groups)
    each = max(1, -(-num_cores // _MAX_CELLS))
    columns = 2 if len(picture.packages) > 1 else 1
    width = (_WIDTH - (columns + 1) * _GAP) / columns
    for start in range(0, len(picture.packages), columns):
        row = picture.packages[start : start + columns]
        places = [_GAP + column * (width + _GAP) for column in range(columns)]
        y = max(_package(sheet, package, x, y, width, each) for package, x in zip(row, places, strict=False)) + _GAP
    if picture.unplaced:
        sheet.text(_GAP, y + 12, "Where these are is not known", "name")
        y = _devices(sheet, picture.unplaced, _GAP, y + _LINE, _WIDTH - 2 * _GAP) + _GAP
    for text in (*(f"{title}, no CPUs" for title in picture.elsewhere), *picture.notes)[:_MAX_LINES]:
        sheet.text(_GAP, y + 12, text, "muted", _WIDTH - 2 * _GAP)
        y += _LINE
    for title, rows, names in links_of(picture):
        y = _links(sheet, picture, title, rows, names, y + 8)
    return y


def _package(sheet: _Sheet, package: DrawnPackage, x: float, y: float, width: float, each: int) -> float:
    inside = _Sheet()
    inside.text(x + 12, y + 20, package.title, "name")
    bottom = y + 30
    for node in package.nodes:
        bottom = _node(inside, node, x + 10, bottom, width - 20, each) + 10
    sheet.rect(x, y, width, bottom - y, "box")
    sheet.parts += inside.parts
    return bottom


def _node(sheet: _Sheet, node: DrawnNode, x: float, y: float, width: float, each: int) -> float:
    inside = _Sheet()
    inside.text(x + 10, y + 17, node.title, "name", width / 2)
    inside.text(x + 20 + _LETTER * len(node.title) * 1.1, y + 17, node.caches, "muted", width / 2)
    bottom = _cells(inside, node, x + 10, y + 26, width - 20, each) + 6
    for group in node.groups[:_MAX_LINES]:
        inside.rect(x + 10, bottom + 3, 10, 10, _color(group))
        who = group.ranks_text or "no rank"
        inside.text(x + 26, bottom + 12, f"{who}: {len(group.cores)} cores, CPUs {group.cpus}", "", width - 40)
        bottom += _LINE
    if len(node.groups) > _MAX_LINES:
        inside.text(x + 26, bottom + 12, f"{len(node.groups) - _MAX_LINES} more groups of cores", "muted")
        bottom += _LINE
    bottom = _devices(inside, node.devices, x + 10, bottom + 4, width - 20) + 6
    sheet.rect(x, y, width, bottom - y, "inner")
    sheet.parts += inside.parts
    return bottom


def _cells(sheet: _Sheet, node: DrawnNode, x: float, y: float, width: float, each: int) -> float:
    """Draw a square for each core, or for `each` cores of one group."""
    across = max(1, int(width // _CELL))
    number = 0
    for group in node.groups:
        for start in range(0, len(group.cores), each):
            cores = DrawnCores(cores=group.cores[start : start + each], ranks=group.ranks, partly=group.partly)
            row, column = divmod(number, across)
            title = f"CPUs {cores.cpus}: {group.ranks_text or 'no rank'}"
            sheet.rect(x + column * _CELL, y + row * _CELL, _CELL - 2, _CELL - 2, _color(group), title)
            number += 1
    return y + -(-number // across) * _CELL


def _color(group: DrawnCores) -> str:
    ranks = sorted({*group.ranks, *group.partly})
    return "none" if not ranks else "many" if len(ranks) > 1 else f"r{ranks[0] % _NUM_COLORS}"


def _devices(sheet: _Sheet, devices: Sequence[DrawnDevice], x: float, y: float, width: float) -> float:
    """Draw devices as boxes, two in a row."""
    each = (width - 8) / 2
    for number, device in enumerate(devices):
        left, top = x + number % 2 * (each + 8), y + number // 2 * 44
        sheet.rect(left, top, each, 38, "box", f"{device.name} {device.address}")
        color = f"r{device.ranks[0] % _NUM_COLORS}" if len(device.ranks) == 1 else "many" if device.ranks else "none"
        sheet.rect(left, top, 5, 38, color)
        head = "  ".join(filter(None, (device.name, device.address, ranks_text(device.ranks))))
        sheet.text(left + 12, top + 15, head, "name", (each - 16) / 1.1)
        sheet.text(left + 12, top + 31, device.detail, "muted", each - 16)
    return y + -(-len(devices) // 2) * 44


def _links(sheet: _Sheet, picture: Picture, title: str, rows: Sequence[str], columns: Sequence[str], y: float) -> float:
    sheet.text(_GAP, y + 14, f"Links, {title}", "name")
    first = _GAP + 12 + _LETTER * max(map(len, rows))
    width = min(64.0, (_WIDTH - _GAP - first) / len(columns))
    top = y + 22
    for column, name in enumerate(columns):
        sheet.text(first + (column + 0.5) * width, top + 13, name, "cell muted", width)
    for number, row in enumerate(rows, start=1):
        line = top + number * 20
        sheet.text(_GAP, line + 13, row, "muted")
        for column, name in enumerate(columns):
            link = picture.links.get((row, name), "X")
            kind = "near" if link.startswith("NV") else _NEAR.get(link, "none")
            sheet.rect(first + column * width, line, width - 2, 18, kind, f"{row} to {name}: {link}")
            sheet.text(first + (column + 0.5) * width, line + 13, link, "cell", width + 8)
    return top + (len(rows) + 1) * 20
