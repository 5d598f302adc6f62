"""Which messages of the rebuilt steps need both sides: those whose senders were held until the receivers came."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from cases import each_case

from hpcpace.metrics.operations import ProcessGroup
from hpcpace.metrics.step_graph import _meets
from hpcpace.trace.schema import ExitKind, Op

SEND, RECV = int(Op.SEND), int(Op.RECV)


@each_case(
    ("exit_of_send", "exit_kind", "is_on_device", "blocked_ns", "meets"),
    [
        ((130, 230), ExitKind.COMPLETION, False, 0, True),
        ((130, 205), ExitKind.COMPLETION, False, 0, False),  # in the second step it left before its receiver came
        ((130, 230), ExitKind.WAIT, False, 20, False),  # gloo: only a wait saw the end
        ((130, 230), ExitKind.WAIT, True, 20, True),  # a batch that held its device until its end
        ((130, 230), ExitKind.WAIT, True, 0, False),  # the device came to the wait later
    ],
)
def test_a_message_needs_both_sides_where_its_sender_was_always_held(
    exit_of_send: tuple[int, int], exit_kind: ExitKind, is_on_device: bool, blocked_ns: int, meets: bool
) -> None:
    # A message of two steps that is received late, and an all-reduce of both ranks.
    operations = SimpleNamespace(
        op=np.array([SEND, SEND, RECV, RECV, 0, 0, 0, 0], np.uint8),
        enter_ns=np.array([100, 200, 110, 210, 300, 400, 300, 400]),
        exit_ns=np.array([*exit_of_send, 130, 230, 350, 450, 350, 450]),
        exit_kind=np.array([exit_kind] * 2 + [ExitKind.COMPLETION] * 6, np.uint8),
        blocked_ns=np.full(8, blocked_ns),
        group=np.zeros(8, np.int64),
        groups=(ProcessGroup(name="pp", ranks=(0, 1), is_on_device=is_on_device),),
    )
    table = np.arange(8).reshape(4, 2)
    found = _meets(operations, table, np.array([0, 0, 1, 1]), np.arange(4))
    assert found.tolist() == [meets, meets, False, False]
