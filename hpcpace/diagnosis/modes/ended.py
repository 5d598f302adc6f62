"""A run that ended before its time because of a rank: by an exception, an exit code, a signal, or without a word."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpace.diagnosis.modes.evidence import EndEvidence
from hpcpace.diagnosis.modes.finding import DiagnosisFinding, Panels, rank_culprit
from hpcpace.diagnosis.modes.run_end import EndKind, RunEnd


def end_finding(end: RunEnd | None, hangs: Sequence[DiagnosisFinding], panels: Panels) -> tuple[DiagnosisFinding, ...]:
    """Return the finding on the end of a run; nothing where it is no fault of the run, or where a hang explains it.

    A signal to all ranks comes from outside: the time limit, scancel, or a launcher.

    Args:
        end: what ended the run; None where it ended in order, or still runs.
        hangs: the findings on hangs.
        panels: the steps.
    """
    if end is None or (end.kind is EndKind.SIGNAL and end.is_everywhere):
        return ()
    if hangs and end.kind not in (EndKind.EXCEPTION, EndKind.EXIT):
        return ()
    hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
    culprits = (rank_culprit(rank, hosts, 1.0, (1.0, 1.0), panels) for rank in end.ranks)
    evidence = EndEvidence(end=end, step=end.step, waiting=len(end.waiting))
    return (DiagnosisFinding(evidence=evidence, loss_share=0.0, confidence=0.99, culprits=tuple(culprits)),)
