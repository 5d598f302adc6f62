"""A hang: an operation that some ranks entered and others never did, or that all entered and not all left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.evidence import HangEvidence
from hpcpace.diagnosis.modes.finding import DiagnosisFinding, Int64s, Panels, rank_culprit
from hpcpace.metrics.operations.incomplete import OpenOperation

_ALIKE = 0.5


def silence_ns(flushes_ns: Int64s) -> int:
    """Return the longest time between two signs of life of a rank, its flushes, nanoseconds; 0 for fewer than two."""
    return int(np.diff(np.sort(flushes_ns)).max(initial=0))


def hang_finding(
    hangs: Sequence[OpenOperation],
    panels: Panels,
    silences_ns: Mapping[int, int],
    settings: DiagnosisConfig,
    *,
    unrecorded: Sequence[int] = (),
) -> tuple[DiagnosisFinding, ...]:
    """Return the hang, where an operation lasted longer than `hang_s` and twenty usual steps.

    The culprits are the ranks that never entered it. If all members did, they are the ranks that showed no sign of life
    for half of that time, unless those are most of the members: a stopped process does not flush either. Some members
    may have completed it, such as one that was stopped and goes on when the job is ended. Then those inside must have
    recorded for as long: of a rank that was killed soon after its enter, it is not known that it stayed. Ranks that
    came when the operation had failed on others are the culprits: it ended there because it ran out of time.

    Args:
        hangs: operations that never completed.
        panels: the steps.
        silences_ns: longest silence of each rank.
        settings: the thresholds.
        unrecorded: ranks of which nothing is known, so that they may have entered any operation.
    """
    usual_ns = float(np.median(panels.times_ns)) if len(panels.times_ns) else 0.0
    least_ns = max(settings.hang_s * 1e9, 20 * usual_ns)
    found = [operation for operation in hangs if operation.age_ns >= least_ns]
    inside = {rank for operation in hangs for rank in operation.inside}
    known_absent = {operation: set(operation.absent) - set(unrecorded) for operation in found}
    missed = [operation for operation in found if known_absent[operation]]
    unknown = [operation for operation in found if operation.absent and not known_absent[operation]]
    entered = [
        operation
        for operation in found
        if operation.members and not operation.absent and (not operation.completed or operation.inside_ns >= least_ns)
    ]
    # A rank inside another operation is itself held up, possibly by a rank of which nothing is known.
    has_culprit = any(known_absent[operation] - inside for operation in missed)
    if missed and (has_culprit or not unknown):
        first = max(missed, key=lambda operation: (bool(known_absent[operation] - inside), operation.age_ns))
        guilty = sorted(known_absent[first] - inside) or sorted(known_absent[first])
    elif unknown:
        first, guilty = max(unknown, key=lambda operation: operation.age_ns), []
    elif entered:
        first = max(entered, key=lambda operation: (not operation.completed, operation.age_ns))
        guilty = [rank for rank in first.members if silences_ns.get(rank, 0) >= _ALIKE * first.age_ns]
        guilty = list(first.late) or guilty
        guilty = guilty if 2 * len(guilty) <= len(first.members) else []
    else:
        return ()
    hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
    evidence = HangEvidence(
        op=first.op,
        age_ns=first.age_ns,
        step=first.step,
        inside=len(first.inside),
        absent=len(first.absent),
        completed=len(first.completed),
        failed=len(first.failed),
        late=len(first.late),
    )
    return (
        DiagnosisFinding(
            evidence=evidence,
            loss_share=1.0,
            confidence=0.99,
            culprits=tuple(rank_culprit(rank, hosts, 1.0, (1.0, 1.0), panels) for rank in guilty),
        ),
    )
