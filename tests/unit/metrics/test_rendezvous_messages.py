"""Which messages of the rebuilt steps need both sides: those whose senders were held until the receivers came."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from cases import each_case

from hpcpace.metrics.step_graph import _meets
from hpcpace.trace.schema import ExitKind, Op

SEND, RECV = int(Op.SEND), int(Op.RECV)


@each_case(
    ("exit_of_send", "exit_kind", "meets"),
    [
        ((130, 230), ExitKind.COMPLETION, True),
        ((130, 205), ExitKind.COMPLETION, False),  # in the second step it left before its receiver came
        ((130, 230), ExitKind.WAIT, False),  # gloo: only a wait saw the end
    ],
)
def test_a_message_needs_both_sides_where_its_sender_was_always_held(
    exit_of_send: tuple[int, int], exit_kind: ExitKind, meets: bool
) -> None:
    # A message of two steps that is received late, and an all-reduce of both ranks.
    operations = SimpleNamespace(
        op=np.array([SEND, SEND, RECV, RECV, 0, 0, 0, 0], np.uint8),
        enter_ns=np.array([100, 200, 110, 210, 300, 400, 300, 400]),
        exit_ns=np.array([*exit_of_send, 130, 230, 350, 450, 350, 450]),
        exit_kind=np.array([exit_kind] * 2 + [ExitKind.COMPLETION] * 6, np.uint8),
    )
    table = np.arange(8).reshape(4, 2)
    found = _meets(operations, table, np.array([0, 0, 1, 1]))
    assert found.tolist() == [meets, meets, False, False]
