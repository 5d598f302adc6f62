"""Waiting for data: the mean share of the step that ranks spend in the phase `data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpcpace.core.text import format_duration, percent, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Said,
    first_ranks,
    mean_share_interval,
    phase_culprit,
    rank_culprit,
)
from hpcpace.diagnosis.summary import Mode
from hpcpace.metrics import Bools


@dataclass(frozen=True, kw_only=True)
class InputThresholds(Thresholds, topic="input"):
    """When waiting for data is worth a word, and which ranks are named."""

    notable_share: float = number(
        0.05, "share", "Share of the step that waiting for data must take to be mentioned if nothing is wrong."
    )
    part_of_all: float = number(
        0.5, "share", "Part of the threshold of all ranks that one rank must wait to be named: others wait less."
    )
    part_of_longest: float = number(
        0.25, "share", "Part of the longest wait of a rank that another one must wait to be named with it."
    )


@dataclass(frozen=True, kw_only=True)
class InputEvidence(Evidence):
    """Waiting for data.

    Attributes:
        share: its mean share of the step time.
        ranks: the ranks that wait; empty where that is all of them.
        waiting_ns, others_ns: mean time per step of those that wait and of the others; None where all wait.
    """

    mode: ClassVar[str] = Mode.INPUT
    needs_no_others: ClassVar[bool] = True
    share: float
    ranks: tuple[int, ...] = ()
    waiting_ns: float | None = None
    others_ns: float | None = None

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        why = f"the phase takes {percent(self.share)} of the step {said.interval}"
        if self.waiting_ns is not None and self.others_ns is not None:
            waiting, others = format_duration(self.waiting_ns), format_duration(self.others_ns)
            why += f"; {waiting} per step on {rank_list(self.ranks)}, {others} on the others"
        return FindingWords(
            headline=f"input-bound: waiting for data costs {said.lost}{self._where(said.hosts)}",
            why=why,
            next="use more loader workers, prefetching, or a faster or node-local file system",
        )

    def _where(self, hosts: Mapping[int, str]) -> str:
        if not self.ranks:
            return ", on all ranks" if len(hosts) > 1 else ""
        return f", on {first_ranks(self.ranks, hosts)}"


def find(case: Case) -> list[DiagnosisFinding]:
    """Return whether the job waits for its data: mean share of the phase `data` in the step.

    The loss is what the slowest rank of a role takes with this phase, less without: all wait for the rank whose data
    arrive last.
    """
    panels, limits, least = case.rest, case.thresholds.of(InputThresholds), case.settings.input_share
    share = float(panels.data_ns.mean()) / panels.mean_time_ns
    if share < least:
        return []
    of_rank = panels.data_ns.mean(axis=1) / panels.mean_time_ns
    waits: Bools = of_rank >= max(limits.part_of_all * least, limits.part_of_longest * float(of_rank.max()))
    interval = mean_share_interval(panels, panels.data_ns)
    evidence = InputEvidence(share=share)
    culprits = [phase_culprit("data", share, interval)]
    if not waits.all():
        for row in np.flatnonzero(waits).tolist():
            spent_ns = panels.data_ns[row : row + 1]
            effect, interval = float(spent_ns.mean()) / panels.mean_time_ns, mean_share_interval(panels, spent_ns)
            culprits.append(rank_culprit(int(panels.rank[row]), effect, interval, panels))
        evidence = InputEvidence(
            share=share,
            ranks=tuple(panels.rank[waits].tolist()),
            waiting_ns=float(panels.data_ns[waits].mean()),
            others_ns=float(panels.data_ns[~waits].mean()),
        )
    loss_share = max(case.gain_share(panels.data_ns), share)
    return [DiagnosisFinding(evidence=evidence, loss_share=loss_share, confidence=0.97, culprits=tuple(culprits))]
