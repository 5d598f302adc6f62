"""The terms of a report, each in a few sentences: the page links to them, and docs/glossary.md has the same."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Term:
    """One entry.

    Attributes:
        name: as it is listed.
        meaning: in sentences.
        spoken: regular expressions of what links to it; the name, also in the plural, if empty.
    """

    name: str
    meaning: str
    spoken: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """The id of the entry in the page."""
        return "term-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


GLOSSARY = (
    Term(
        name="A, amplification",
        meaning=(
            "Work of the slowest rank over the mean of all ranks, taken between synchronisations and added up. "
            "A = 1 means no loss. A is the product of two parts: lasting differences (a slow rank) and jitter proper. "
            "A(k) is the same for k of the ranks."
        ),
        spoken=(r"[Aa]mplification(?: A)?", r"A(?= of (?:lasting|jitter))", r"A\(k\)"),
    ),
    Term(
        name="bubble",
        meaning=(
            "Time in which pipeline stages wait for each other's messages, because the pipeline fills and drains in "
            "every step. A pipeline of equal stages has it too."
        ),
    ),
    Term(name="busy", meaning="Forward, backward and optimizer, as a share of the step."),
    Term(
        name="confidence",
        meaning="Probability that the verdict names the right mode, calibrated on runs whose truth is known.",
    ),
    Term(
        name="critical path",
        meaning=(
            "Chain of work and transfers, without a wait, that determines when a step ends. The step gets shorter "
            "only if this path does."
        ),
    ),
    Term(
        name="drift",
        meaning="Rate at which a clock gains or loses against the reference, in parts per million.",
    ),
    Term(
        name="excess",
        meaning=(
            "Own work of a rank above what is usual for the other ranks of its role. With +10 % it takes 10 % longer "
            "for the same work."
        ),
    ),
    Term(
        name="exposed",
        meaning=(
            "Communication that blocked the rank, because no computation hid it. Hidden waits and transfers cost "
            "nothing and are in no share of the step."
        ),
    ),
    Term(
        name="half-width",
        meaning=(
            "Bound on the error of a clock comparison: the true time is within this distance of the one given. "
            "Times of two hosts compare to within both half-widths."
        ),
    ),
    Term(
        name="intensity of noise",
        meaning=(
            "How much the work of a rank varies: its mean over its 5 % quantile, less 1, averaged over ranks. The "
            "effect of noise on the step is above 1 where waiting amplifies it, and below 1 where it is absorbed."
        ),
        spoken=(r"[Nn]oise intensity", r"[Ee]ffect of noise", r"[Ii]ntensity of noise"),
    ),
    Term(
        name="interval",
        meaning=(
            "Range that contains the mean over more such steps of these ranks with 95 % confidence. It does not cover "
            "clock errors, nor what other nodes would show."
        ),
        spoken=(r"95 % intervals?",),
    ),
    Term(
        name="jitter",
        meaning=(
            "Differences in own work that change from step to step. Where ranks wait for each other, every step lasts "
            "as long as its slowest rank. Lasting differences between ranks are no jitter."
        ),
        spoken=(r"[Jj]itter proper", r"[Jj]itter"),
    ),
    Term(
        name="lateness",
        meaning="Excess of the latest rank, mean over steps. A place has the share that would go without its effect.",
    ),
    Term(
        name="noise",
        meaning=(
            "Variation by chance. In the table of ranks it is the excess that chance alone explains: in 999 of 1,000 "
            "runs of equal ranks, no rank exceeds it."
        ),
    ),
    Term(
        name="overlap",
        meaning="Share of communication that is hidden behind computation.",
        spoken=(r"[Oo]verlap", r"hidden behind computation"),
    ),
    Term(
        name="own delay",
        meaning="Own work of a rank in one step, less the median of the other ranks of its role in that step.",
    ),
    Term(
        name="own work",
        meaning=(
            "What a rank does by itself: data, forward, backward, optimizer, garbage collection and other, without "
            "waits and transfers. Blame follows own work, because a late arrival may be inherited."
        ),
    ),
    Term(
        name="passed on",
        meaning="Waiting that reached a rank through another one, which had waited itself.",
    ),
    Term(
        name="residual",
        meaning=(
            "Difference between a measured clock offset and the one interpolated from its neighbours. It is the error "
            "as measured, while the half-width is the bound."
        ),
    ),
    Term(
        name="role",
        meaning=(
            "One pipeline stage and tensor slot. Ranks of a role do the same work, and ranks are compared only with "
            "others of their role."
        ),
    ),
    Term(
        name="skew",
        meaning="Time between the first and the last arrival at an operation.",
    ),
    Term(
        name="step",
        meaning=(
            "One update of the weights. Its time runs from the end of the step before to its own end, each on the "
            "last rank."
        ),
        spoken=(r"[Ss]tep times?",),
    ),
    Term(
        name="transfer",
        meaning=(
            "Part of an operation after its last partner has arrived: data move. In shares of the step, only what "
            "blocked the rank counts."
        ),
    ),
    Term(
        name="unmatched",
        meaning=(
            "Operations whose counterparts are not in the traces of all members. Their waits are unknown, and the "
            "time that they blocked counts as transfer."
        ),
    ),
    Term(
        name="wait",
        meaning="Part of an operation until its last partner arrives. The network is not its cause.",
        spoken=(r"[Ww]aits?", r"[Ww]aiting"),
    ),
)
"""In alphabetical order."""


def _pattern() -> re.Pattern[str]:
    forms = ["|".join(term.spoken) or _usual(term.name) for term in GLOSSARY]
    return re.compile("|".join(rf"(?P<t{place}>(?<![\w-])(?:{form})(?![\w-]))" for place, form in enumerate(forms)))


def _usual(name: str) -> str:
    return f"[{name[0].upper()}{name[0]}]{re.escape(name[1:])}s?"


_PATTERN = _pattern()


def terms_in(text: str) -> list[tuple[int, int, Term]]:
    """Return where a text has terms, from begin to end, and which."""
    return [(found.start(), found.end(), GLOSSARY[int(str(found.lastgroup)[1:])]) for found in _PATTERN.finditer(text)]
