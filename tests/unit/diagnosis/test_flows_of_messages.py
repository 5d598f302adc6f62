"""Of jobs that mostly send messages, connections are judged by how long their messages are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis import flow_evidence


@pytest.mark.parametrize(
    ("message_bytes", "expected"), [(60, 30.0), (40, np.inf), (0, np.inf)], ids=["mostly", "partly", "none"]
)
def test_the_size_of_messages_counts_where_most_bytes_are_messages(
    monkeypatch: pytest.MonkeyPatch, message_bytes: int, expected: float
) -> None:
    sizes: list[float] = []
    monkeypatch.setattr(flow_evidence, "_located", lambda *arguments: sizes.append(arguments[-1]))
    network: Any = SimpleNamespace(flows=object())
    kinds: Any = [
        SimpleNamespace(op="send", size_bytes=message_bytes, num_rows=2),
        SimpleNamespace(op="all_reduce", size_bytes=100 - message_bytes, num_rows=7),
    ]
    flow_evidence.flow_findings(network, DiagnosisConfig(), kinds)
    assert sizes == [expected]


def test_a_run_without_any_operation_has_no_messages() -> None:
    assert flow_evidence._message_bytes([]) == np.inf
