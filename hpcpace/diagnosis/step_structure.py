"""How steps are built of own work, operations and waits for others: what jitter, causes and gains are read off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence
from hpcpace.metrics.causes.replay import StepGraph
from hpcpace.metrics.causes.step_graph import step_graph
from hpcpace.metrics.lateness.segments import LocalWork, local_work
from hpcpace.metrics.operations.blocked_time import Blocks
from hpcpace.metrics.steps import StepPanel
from hpcpace.trace.schema import Phase

MOST_OPERATIONS = 4_000_000
"""Beyond it steps are not taken apart: to do so with more operations takes longer than all other figures."""


@dataclass(frozen=True, kw_only=True)
class StepStructure:
    """The steps, taken apart.

    Attributes:
        steps: the used steps on the common clock.
        ranks: what its rows are.
        blocks: stretches in which ranks were blocked that no operation accounts for.
        work: own work before each operation.
        graph: the steps as a graph; None where they are not alike.
    """

    steps: StepPanel
    ranks: Sequence[int]
    blocks: Blocks
    work: LocalWork
    graph: StepGraph | None


def step_structure(evidence: Evidence, steps: StepPanel, role: NDArray[np.int64]) -> StepStructure | None:
    """Return the steps taken apart; None where there are too many operations, or none.

    Args:
        evidence: the traces.
        steps: the used steps on the common clock.
        role: role of each rank, int64, (num_ranks,).
    """
    done, ranks = evidence.operations, evidence.ranks
    if not 0 < len(done) <= MOST_OPERATIONS:
        return None
    blocks = _blocks(evidence)
    work = local_work(done, steps, ranks=ranks, role=role, blocks=blocks)
    graph = step_graph(done, evidence.matching, evidence.waits, work, steps, ranks=ranks, role=role, blocks=blocks)
    return StepStructure(steps=steps, ranks=ranks, blocks=blocks, work=work, graph=graph)


def _blocks(evidence: Evidence) -> Blocks:
    """Return the stretches in which ranks waited inside torch, or were paced, on the common clock."""
    rank, begin_ns, end_ns, is_pause = [], [], [], []
    for trace, clock in zip(evidence.traces, evidence.clocks, strict=True):
        phases = trace.tables["phases"]
        chosen = np.isin(phases["phase"], (Phase.GRAD_SYNC, Phase.PACE)) & (phases["end_ns"] > phases["begin_ns"])
        begin_ns.append(clock.to_reference(phases["begin_ns"][chosen]).time_ns)
        end_ns.append(clock.to_reference(phases["end_ns"][chosen]).time_ns)
        is_pause.append(phases["phase"][chosen] == Phase.PACE)
        rank.append(np.full(int(chosen.sum()), trace.header.rank, np.int64))
    return Blocks(
        rank=np.concatenate(rank),
        begin_ns=np.concatenate(begin_ns),
        end_ns=np.concatenate(end_ns),
        is_pause=np.concatenate(is_pause),
    )
