"""The forward and backward passes of the steps that are taken apart, and whether their work varies with the data."""

from __future__ import annotations

import numpy as np

from hpcpace.diagnosis.close_up import CloseUp
from hpcpace.metrics.causes.even_work import Passes, own_work
from hpcpace.metrics.clocks.rank_clocks import reference_times
from hpcpace.metrics.lateness.data_variation import DataVariation, data_variation
from hpcpace.metrics.steps import columns_of
from hpcpace.trace.schema import Phase

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_OF_DATA = (Phase.FORWARD, Phase.BACKWARD)


def passes_of(close_up: CloseUp) -> list[Passes]:
    """Return the forward and backward passes and optimizer steps of each rank."""
    found = []
    for trace, clock in zip(close_up.evidence.traces, close_up.evidence.clocks, strict=True):
        phases = trace.tables["phases"]
        chosen = np.flatnonzero(np.isin(phases["phase"], _PASSES) & (phases["end_ns"] > phases["begin_ns"]))
        chosen = chosen[columns_of(close_up.steps.step, np.asarray(phases["step"][chosen], np.int64)) >= 0]
        begin_ns, end_ns = (reference_times(clock, phases[name][chosen]) for name in ("begin_ns", "end_ns"))
        found.append(Passes(kind=phases["phase"][chosen].astype(np.int64), begin_ns=begin_ns, end_ns=end_ns))
    return found


def data_variation_of(close_up: CloseUp) -> DataVariation | None:
    """Return how the work of microbatches varies; None where steps are not rebuilt, or passes are not alike in number.

    The n-th pass of a step is that of the same microbatch on all stages.
    """
    graph, passes = close_up.graph, passes_of(close_up)
    headers = [trace.header for trace in close_up.evidence.traces]
    if graph is None or not all(len(one.kind) for one in passes) or len({header.pp for header in headers}) < 2:
        return None
    panels = []
    for one, own_ns in zip(passes, own_work(graph, passes), strict=True):
        of_rank = [own_ns[one.kind == kind][np.argsort(one.begin_ns[one.kind == kind])] for kind in _OF_DATA]
        panels.append(of_rank)
    num_steps = len(graph.step)
    counts = {len(own_ns) for of_rank in panels for own_ns in of_rank}
    if len(counts) != 1 or graph.num_left_out or counts.pop() % num_steps:
        return None
    return data_variation(
        np.array(panels).reshape(len(panels), len(_OF_DATA), num_steps, -1),
        np.array([header.pp for header in headers]),
        np.array([header.dp * (1 << 20) + header.tp for header in headers]),
    )
