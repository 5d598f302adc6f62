"""The head of the HTML report: what is wrong in one sentence, why, what to do, and what shares the loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcpace.core.text import alias_name, percent, place_name
from hpcpace.diagnosis.diagnose import Culprit
from hpcpace.diagnosis.summary import HangFigures, Verdict
from hpcpace.report.html.text import About, anchor, escape, first_terms, prose, table, with_terms

_LONG_HEADLINE = 80
_NONE = "\N{EN DASH}"
_LONGEST_TAG = 40
_MOST_CULPRITS = 12
_OF_RANKS = ("Own delay by rank and step", "Phases by rank")
_EVIDENCE = {
    "persistent straggler": _OF_RANKS,
    "transient straggler": (*_OF_RANKS, "Slowest step"),
    "pipeline imbalance": ("Phases by rank", "Causes"),
    "runtime and control plane": ("Own delay by rank and step", "Step times"),
    "fabric contention": ("Places", "Communication by kind"),
    "locality": ("Places", "Communication by kind"),
    "synchronisation amplification": ("Jitter and scale",),
    "input-bound": ("Phases by rank",),
    "host-bound": ("Phases by rank",),
    "ranks share cores": ("Cores",),
    "communication-bound": ("Communication by kind",),
}
"""The sections that show what each mode rests on."""
_STOPPED = ("hang", "ended early")
"""Modes whose culprits did not take more of the time than others: the sentences name them."""
_KINDS = {"healthy": "healthy", "cannot tell": "unsure"}


def verdict_head(verdict: Verdict, titles: Collection[str] = ()) -> str:
    """Return the verdict as the first thing of the page; `titles` are the sections that its sentences may lead to."""
    kind = _KINDS.get(verdict.mode, "")
    sure = f" · confidence {100 * verdict.confidence:.0f} %" if verdict.confidence > 0 else ""
    tag, _, rest = verdict.headline.partition(": ")
    is_tagged = bool(rest) and len(tag) <= _LONGEST_TAG
    tag, headline = (tag, rest) if is_tagged else (verdict.mode, verdict.headline)
    long = ' class="long"' if len(headline) > _LONG_HEADLINE else ""
    why = [(line, _EVIDENCE.get(verdict.mode, ())) for line in verdict.why]
    also = [(line, _EVIDENCE.get(line.partition(":")[0], ())) for line in verdict.also]
    parts = (("Why", why), ("Next", [(line, ()) for line in verdict.next]), ("Also", also))
    rows = "".join(f"<dt>{name}</dt><dd>{_paragraphs(lines, titles)}</dd>" for name, lines in parts if lines)
    culprits = "" if verdict.mode in _STOPPED else _culprits(verdict.culprits)
    inside = (
        f'<p class="mode">{escape(_capital(tag))}<span>{with_terms(sure)}</span></p>\n'
        f"<h1{long}>{prose(_capital(headline))}</h1>\n<dl>{rows}</dl>\n{culprits}"
    )
    return f'<div class="verdict {kind}">\n{first_terms(inside)}\n</div>'


def hang_stacks(hang: HangFigures | None) -> str:
    """Return where the threads of ranks were that held up the others, innermost frame first; empty if unknown."""
    stacks = () if hang is None else hang.stacks
    return "".join(_stack(stack.rank, stack.frames) for stack in stacks)


def _stack(rank: int, frames: Sequence[str]) -> str:
    lines = "\n".join(escape(frame) for frame in reversed(frames))
    return f"<details open><summary>Stack of rank {rank}</summary><pre>{lines}</pre></details>\n"


def _culprits(culprits: Sequence[Culprit]) -> str:
    rows = [
        (
            place_name(culprit.kind, culprit.id),
            percent(culprit.effect),
            f"{percent(culprit.interval[0])} to {percent(culprit.interval[1])}",
            ", ".join(alias_name(alias) for alias in culprit.aliases if alias != own) or _NONE,
        )
        for culprit in culprits[:_MOST_CULPRITS]
        for own in [f"{culprit.kind} {culprit.id}"]
    ]
    some = f", the first {_MOST_CULPRITS} of {len(culprits)}" if len(culprits) > _MOST_CULPRITS else ""
    head = ("who", "more than others", "95 % interval", "could also be")
    about = [_about(culprit) for culprit in culprits[:_MOST_CULPRITS]]
    return table(f"Who is at fault{some}", head, rows, text=(0, 3), about=about)


def _about(culprit: Culprit) -> About:
    return (culprit.id if culprit.kind == "rank" else "", culprit.id if culprit.kind == "node" else "")


def _paragraphs(lines: Sequence[tuple[str, Sequence[str]]], titles: Collection[str]) -> str:
    """Return sentences, each with links to those sections of the page that show its evidence."""
    return "".join(
        f"<p>{with_terms(_capital(line))}{''.join(_link(title) for title in evidence if title in titles)}</p>"
        for line, evidence in lines
    )


def _link(title: str) -> str:
    return f' <a class="evidence" href="#{anchor(title)}">{escape(title)}</a>'


def _capital(text: str) -> str:
    return text if text[:1] in "#`" else text[:1].upper() + text[1:]
