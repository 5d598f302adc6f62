"""Where each rank's time went in each step, measured for some steps at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.evidence import Evidence
from hpcpace.metrics.causes.bubble import covered_by_waits
from hpcpace.metrics.operations.dependence import MESSAGES, is_one_of, synchronises
from hpcpace.metrics.operations.overlap import under_way_ns
from hpcpace.metrics.phases import Part, parts_of_steps
from hpcpace.metrics.steps import StepPanel, columns_of
from hpcpace.trace.schema import Op
from hpcpace.trace.tables import Table

_COLUMNS = ("step", "op", "enter_ns", "exit_ns", "blocked_ns")


@dataclass(frozen=True, kw_only=True)
class StepPanels:
    """Nanoseconds of each rank in each step, each float64, (num_ranks, num_steps), or with a further axis.

    Attributes:
        parts_ns: the parts of the step, (num_ranks, num_steps, num_parts).
        blocked_ns: time blocked on synchronising collectives of the step.
        sent_ns: time blocked on sends of the step.
        message_wait_ns: time in which the rank was blocked waiting for messages.
        under_way_ns: time in which any of its operations was under way.
        unmatched_ns: likewise, of those without a counterpart on every member.
    """

    parts_ns: NDArray[np.float64]
    blocked_ns: NDArray[np.float64]
    sent_ns: NDArray[np.float64]
    message_wait_ns: NDArray[np.float64]
    under_way_ns: NDArray[np.float64]
    unmatched_ns: NDArray[np.float64]

    @classmethod
    def empty(cls, shape: tuple[int, int], zeros: Callable[[tuple[int, ...]], NDArray[np.float64]]) -> StepPanels:
        """Return panels to fill, made by `zeros` such as `np.zeros`; `shape` is (num_ranks, num_steps)."""
        return cls(
            parts_ns=zeros((*shape, len(Part))),
            blocked_ns=zeros(shape),
            sent_ns=zeros(shape),
            message_wait_ns=zeros(shape),
            under_way_ns=zeros(shape),
            unmatched_ns=zeros(shape),
        )

    @property
    def num_steps(self) -> int:
        """Number of the steps."""
        return int(self.parts_ns.shape[1])

    def select(self, columns: slice) -> StepPanels:
        """Return some of the steps, without copying them."""
        return StepPanels(**{item.name: getattr(self, item.name)[:, columns] for item in fields(StepPanels)})

    def put(self, columns: slice, panels: StepPanels) -> None:
        """Set some of the steps."""
        for item in fields(StepPanels):
            getattr(self, item.name)[:, columns] = getattr(panels, item.name)

    def fill(self, index: int, columns: slice, chosen: StepPanel, rows: Table, phases: Table) -> None:
        """Measure some steps of a rank.

        Args:
            index: of the rank.
            columns: the steps.
            chosen: all steps, on each rank's own clock.
            rows: from `divide_operations`, all that are under way in these steps.
            phases: the rank's table.
        """
        begin_ns, end_ns = chosen.begin_ns[index, columns], chosen.end_ns[index, columns]
        if not len(begin_ns):
            return
        near = np.flatnonzero((phases["end_ns"] > begin_ns.min()) & (phases["begin_ns"] < end_ns.max()))
        enter_ns, exit_ns, blocked_ns, wait_ns = (
            rows[name] for name in ("enter_ns", "exit_ns", "blocked_ns", "wait_ns")
        )
        self.parts_ns[index, columns] = parts_of_steps(
            (begin_ns, end_ns),
            (phases["phase"][near], phases["begin_ns"][near], phases["end_ns"][near]),
            (enter_ns, exit_ns, blocked_ns, wait_ns),
        )
        self.under_way_ns[index, columns] = under_way_ns(enter_ns, exit_ns, begin_ns, end_ns)
        alone = np.flatnonzero(~rows["is_matched"])
        self.unmatched_ns[index, columns] = under_way_ns(enter_ns[alone], exit_ns[alone], begin_ns, end_ns)
        column, op = columns_of(chosen.step[columns], rows["step"]), rows["op"]
        is_blocked = (blocked_ns > 0) & (column >= 0)
        for panel, of_op in ((self.blocked_ns, synchronises(op)), (self.sent_ns, op == Op.SEND)):
            used = np.flatnonzero(of_op & is_blocked)
            panel[index, columns] = np.bincount(column[used], weights=blocked_ns[used], minlength=len(begin_ns))
        messages = np.flatnonzero(is_one_of(op, MESSAGES) & is_blocked & (wait_ns > 0))
        if len(messages):
            enter_ns, exit_ns, blocked_ns, wait_ns = (
                times[messages] for times in (enter_ns, exit_ns, blocked_ns, wait_ns)
            )
            waited_ns = covered_by_waits((enter_ns, exit_ns, blocked_ns, wait_ns), (begin_ns, end_ns))
            self.message_wait_ns[index, columns] = waited_ns


def divide_operations(evidence: Evidence, index: int) -> Table:
    """Return what of a rank's operations its steps are divided by, on its own clock."""
    table, end = evidence.collectives[index], evidence.ends[index]
    own = slice(end - len(table), end)
    wait_ns, is_matched = evidence.waits.wait_ns[own], evidence.matching.is_matched[own]
    return Table({**{name: table[name] for name in _COLUMNS}, "wait_ns": wait_ns, "is_matched": is_matched})
