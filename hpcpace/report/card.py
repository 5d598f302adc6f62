"""The card at the end of a run: the verdict, what to do next, and where the step went, in at most 12 lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from hpcpace.core.text import listed, milliseconds, percent, place_name, shell_word
from hpcpace.diagnosis.summary import Finding, Mode, Summary
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.report.document import Document, Notes, Row, Section, Table
from hpcpace.report.run_report import verdict_of, warnings_of
from hpcpace.report.sections.phases import PARTS, drawn_parts
from hpcpace.report.terminal import num_lines, print_document

_MAX_LINES = 12
_MAX_LETTERS = 3 * 62
"""display: of the verdict, and of what to do; three lines beside their labels."""
_MIN_SHARE = 0.005
"""display: smaller parts of a step are left out, unless they hold the cause."""
_GROUPS = (
    ("busy", ("forward", "backward", "optimizer")),
    ("exposed wait", ("sync_wait", "wait")),
    ("transfer", ("sync_transfer", "transfer")),
    ("wait or transfer", ("sync_either", "either")),
    ("other", ("data", "host", "gc", "pace", "checkpoint", "eval", "other")),
)
"""The groups of `Shares.whole`, with the parts of a step in each as `drawn_parts` names them."""
_NAMES = {part: name for name, parts, _, _ in PARTS for part in parts}
_SYNC, _REST, _NO_PHASE = "gradient sync", "elsewhere", "no phase"
_CAUSES = {
    Mode.STRAGGLER: "exposed wait",
    Mode.IMBALANCE: "exposed wait",
    Mode.AMPLIFICATION: "exposed wait",
    Mode.DATA: "exposed wait",
    Mode.RUNTIME: "exposed wait",
    Mode.CONTENTION: "transfer",
    Mode.LOCALITY: "transfer",
    Mode.COMMUNICATION: "transfer",
    Mode.INPUT: "data",
    Mode.HOST: "host",
}
"""Where the loss of a mode shows in the step, unless its phase is known: a group, or one part. Others show anywhere."""


@dataclass(frozen=True)
class _Leaf:
    """A part of the mean step.

    Attributes:
        name: as it is shown.
        parts: of `drawn_parts`.
        time_ns: mean over ranks.
        inside: parts of it.
    """

    name: str
    parts: tuple[str, ...]
    time_ns: float
    inside: tuple[_Leaf, ...] = ()


def card_text(summary: Summary, run: str, *, width: int, encoding: str, has_colors: bool) -> str:
    """Return the card of a run as text.

    Args:
        summary: the figures of its report.
        run: the run as a user names it.
        width: letters in a line; only a command to paste may be longer.
        encoding: of where it is printed.
        has_colors: whether that shows colours.
    """
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace", newline="")
    console = Console(
        file=page,
        width=width,
        force_terminal=has_colors,
        color_system="standard" if has_colors else None,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    document = card_document(summary, run, width=width)
    print_document(console, document)
    page.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in page)


def card_document(summary: Summary, run: str, *, width: int) -> Document:
    """Return the card of a run, with as many parts of the step as fit."""
    most = sum(len(parts) for _, parts in _GROUPS)
    for number in range(most, 0, -1):
        document = _document(summary, run, most_parts=number)
        if num_lines(document, width) <= _MAX_LINES:
            return document
    return _document(summary, run, most_parts=0)


def _document(summary: Summary, run: str, *, most_parts: int) -> Document:
    said = main_verdict(summary.verdict)
    verdict = verdict_of(summary, said)
    finding = said.findings[0] if said.findings else None
    low, high = map(percent, (finding and finding.loss_interval) or (0.0, 0.0))
    cost = f"cost {low} to {high}" if low != high else ""
    sure = ", ".join(word for word in (cost, verdict.sure) if word)
    warnings = [(label, _cut(sentence, _MAX_LETTERS // 3)) for label, sentence in warnings_of(summary, "")]
    return Document(
        heading="hpcpace report",
        subject=shell_word(run),
        title=verdict.headline,
        verdict=replace(
            verdict,
            headline=_cut(verdict.headline, _MAX_LETTERS - len(sure)),
            sure=sure,
            lines=(("Next", [_cut(sentence, _MAX_LETTERS) for sentence in said.next[:1]]),),
            content=(),
        ),
        warnings=warnings[:1],
        sections=(Section("Where the time went", (_tree(summary, finding, most_parts),)),),
        is_brief=True,
    )


def _cut(sentence: str, most: int) -> str:
    """Return a sentence, cut between two words where it is too long."""
    return sentence if len(sentence) <= most else f"{sentence[: most - 4].rsplit(' ', 1)[0]} ..."


def _tree(summary: Summary, finding: Finding | None, most_parts: int) -> Table | Notes:
    """Return where the mean step went, with the cause marked, or why that is not known."""
    step_ns = float(np.mean([row.step_ns for row in summary.ranks])) if summary.ranks else 0.0
    groups = _groups(summary)
    if not groups or not step_ns or summary.shares.whole is None:
        return Notes([summary.unknown or "where the time of a step went is not known"])
    part, mark = _cause(finding)
    shown = _shown(groups, part, step_ns, most_parts)
    num_used = summary.steps.num_used
    root = f"step, mean of {num_used}" if num_used > 1 else "one step"
    rows = [Row((root, f"{milliseconds(step_ns)} ms", "100 %", ""))]
    for place, group in enumerate(shown):
        is_last = place == len(shown) - 1
        rows.append(_row("└─ " if is_last else "├─ ", group, step_ns, part, mark))
        for inner in group.inside:
            stem = ("   " if is_last else "│  ") + ("└─ " if inner is group.inside[-1] else "├─ ")
            rows.append(_row(stem, inner, step_ns, part, mark))
    return Table(("",) * 4, rows, text=(0, 3))


def _groups(summary: Summary) -> list[_Leaf]:
    """Return the groups of parts that the step has; nothing where they are not known on all ranks."""
    known = [drawn_parts(row.parts_ns) for row in summary.ranks if row.parts_ns is not None]
    if not known or len(known) < len(summary.ranks):
        return []
    names = {name for parts in known for name in parts}
    times = {name: float(np.mean([parts.get(name, 0.0) for parts in known])) for name in names}
    groups = []
    for name, parts in _GROUPS:
        inside = tuple(_Leaf(_name_in(part), (part,), times[part]) for part in parts if times.get(part))
        if inside:
            is_one = len(inside) == 1 and (name != "other" or inside[0].name == _NO_PHASE)
            time_ns = sum(leaf.time_ns for leaf in inside)
            groups.append(_Leaf(name, sum((leaf.parts for leaf in inside), ()), time_ns, () if is_one else inside))
    return groups


def _name_in(part: str) -> str:
    """Return the name of a part below its group."""
    if part.startswith("sync_"):
        return _SYNC
    return {"wait": _REST, "transfer": _REST, "either": _REST, "other": _NO_PHASE}.get(part, _NAMES[part])


def _shown(groups: Sequence[_Leaf], cause: str, step_ns: float, most_parts: int) -> list[_Leaf]:
    """Return groups with the largest parts inside them, and with the one that is the cause."""
    inner = [leaf for group in groups for leaf in group.inside]
    inner.sort(key=lambda leaf: (cause not in leaf.parts, -leaf.time_ns))
    kept = [leaf for leaf in inner if leaf.time_ns >= _MIN_SHARE * step_ns or cause in leaf.parts][:most_parts]
    shown = [replace(group, inside=tuple(leaf for leaf in group.inside if leaf in kept)) for group in groups]
    return [group for group in shown if group.inside or group.time_ns >= _MIN_SHARE * step_ns or cause == group.name]


def _row(stem: str, leaf: _Leaf, step_ns: float, cause: str, mark: str) -> Row:
    is_cause = bool(cause) and (cause == leaf.name or (leaf.parts == (cause,) and not leaf.inside))
    share = f"{100 * leaf.time_ns / step_ns:.1f} %"
    cells = (stem + leaf.name, f"{milliseconds(leaf.time_ns)} ms", share, mark if is_cause else "")
    return Row(cells, style="strong" if is_cause else "")


def _cause(finding: Finding | None) -> tuple[str, str]:
    """Return the part or group of the step that holds what the verdict names, and what is said of it; may be empty."""
    if finding is None:
        return "", ""
    names = [place_name(culprit.kind, culprit.id) for culprit in finding.culprits]
    who = listed(names[:2]) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"
    for name, stage in zip(names, finding.stages, strict=False):
        longer = [phase for phase in stage.phases if phase.is_longer] if stage is not None and stage.stages else []
        if longer:
            phase = longer[0]
            own, usual = milliseconds(phase.own_ns), milliseconds(phase.usual_ns)
            return phase.phase, f"<- {name}: {own} ms, usual {usual} ms"
    part = _CAUSES.get(Mode(finding.mode), "") if finding.mode in list(Mode) else ""
    return part, f"<- {who}" if who else "<- the cause"
