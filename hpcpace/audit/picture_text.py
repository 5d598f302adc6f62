"""A picture of the machine in a terminal of 80 columns, without any letter beyond ASCII."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hpcpace.audit.picture import DrawnCores, DrawnDevice, DrawnNode, DrawnPackage, Picture, links_of, ranks_text

WIDTH = 80
_INSIDE = WIDTH - 4
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MOST_STRIP = 64
_MOST_GROUPS = 24
_MOST_NOTES = 6
_LEGEND = (
    "[...] has a letter for each core: its rank (modulo 36), * for several ranks, . for none.",
    "In part: on some hardware threads of these cores only. Links as `nvidia-smi topo -m` has them.",
)


def picture_lines(picture: Picture) -> Iterator[str]:
    """Yield a picture, at most 80 columns wide."""
    yield _cut(picture.title, WIDTH)
    yield _cut(f"  {picture.subtitle}", WIDTH)
    for package in picture.packages:
        yield _cut(f"+-- {package.title} ", WIDTH - 1).ljust(WIDTH - 1, "-") + "+"
        for line in _package_lines(package):
            yield f"| {_cut(line, _INSIDE).ljust(_INSIDE)} |"
    if picture.packages:
        yield "+" + "-" * (WIDTH - 2) + "+"
    for title in picture.elsewhere:
        yield _cut(f"  {title}, no CPUs", WIDTH)
    if picture.unplaced:
        yield "  Where these are is not known:"
        for device in picture.unplaced:
            yield _cut(f"  {_device_line(device)}", WIDTH)
    yield from _link_lines(picture)
    for note in picture.notes[:_MOST_NOTES]:
        yield from _wrapped(note)
    if len(picture.notes) > _MOST_NOTES:
        yield f"  {len(picture.notes) - _MOST_NOTES} more facts are not known"


def legend_lines() -> Iterator[str]:
    """Yield what the letters and words of a picture mean."""
    for sentence in _LEGEND:
        yield from _wrapped(sentence, indent="")


def skipped_lines(skipped: Mapping[str, str]) -> Iterator[str]:
    """Yield which rules did not apply, and why."""
    by_reason: dict[str, list[str]] = {}
    for rule, reason in skipped.items():
        by_reason.setdefault(reason, []).append(rule)
    if by_reason:
        yield "Rules that did not apply:"
    for reason, rules in by_reason.items():
        yield from _wrapped(f"{' '.join(rules)}: {reason}")


def _package_lines(package: DrawnPackage) -> Iterator[str]:
    for node in package.nodes:
        yield f"{node.title}{f'  {node.caches}' if node.caches else ''}"
        yield from _strip_lines(node)
        for group in node.groups[:_MOST_GROUPS]:
            yield _group_line(group)
        if len(node.groups) > _MOST_GROUPS:
            yield f"  {len(node.groups) - _MOST_GROUPS} more groups of cores"
        for device in node.devices:
            yield _device_line(device)


def _strip_lines(node: DrawnNode) -> Iterator[str]:
    """Yield a letter per core; nothing where no rank may run."""
    strip = "".join(_mark(group) * len(group.cores) for group in node.groups)
    if strip.strip("."):
        for line in textwrap.wrap(strip, _MOST_STRIP):
            yield f"  [{line}]"


def _mark(group: DrawnCores) -> str:
    ranks = {*group.ranks, *group.partly}
    return "." if not ranks else "*" if len(ranks) > 1 else _MARKS[next(iter(ranks)) % len(_MARKS)]


def _group_line(group: DrawnCores) -> str:
    threads = group.cores[0].bit_count()
    what = f"{len(group.cores)} core{'s' if len(group.cores) > 1 else ''}"
    who = group.ranks_text
    cpus = _cut(f"CPUs {group.cpus}", 32)
    return f"  {what:<9} {cpus:<32} {f'{threads} threads' if threads > 1 else '':<10} {who}".rstrip()


def _device_line(device: DrawnDevice) -> str:
    line = f"  {_cut(device.name, 12):<12} {device.address}  {device.detail}"
    return f"{_cut(line, 62):<62} {ranks_text(device.ranks)}".rstrip()


def _link_lines(picture: Picture) -> Iterator[str]:
    for title, rows, columns in links_of(picture):
        found = {picture.links[one, other] for one in rows for other in columns if one != other}
        if len(found) == 1 and len(rows) > 1:
            yield f"Links, {title}: {found.pop()} between all"
            continue
        yield f"Links, {title}:"
        first = max(map(len, rows))
        width = max(len(name) for name in (*columns, "NODE")) + 1
        each = max(1, (WIDTH - 2 - first) // width)
        for start in range(0, len(columns), each):
            yield from _table_lines(picture, rows, columns[start : start + each], first, width)


def _table_lines(
    picture: Picture, rows: Sequence[str], columns: Sequence[str], first: int, width: int
) -> Iterator[str]:
    yield f"  {'':<{first}}{''.join(f'{name:>{width}}' for name in columns)}"
    for row in rows:
        cells = (picture.links.get((row, column), "X") for column in columns)
        yield f"  {row:<{first}}{''.join(f'{cell:>{width}}' for cell in cells)}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"  {indent}", break_on_hyphens=False)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
