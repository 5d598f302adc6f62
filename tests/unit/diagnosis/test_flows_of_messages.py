"""Of jobs that mostly send messages, connections call no link slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis import flow_evidence
from hpcpace.metrics.network.link_faults import FlowFindings, LinkCause


@pytest.mark.parametrize(
    ("message_bytes", "causes"),
    [(60, [LinkCause.LOSSY]), (40, [LinkCause.SLOW, LinkCause.LOSSY])],
)
def test_messages_call_no_link_slow(monkeypatch: pytest.MonkeyPatch, message_bytes: int, causes: list[str]) -> None:
    faults: Any = tuple(SimpleNamespace(cause=cause) for cause in (LinkCause.SLOW, LinkCause.LOSSY))
    found = FlowFindings(faults=faults, num_flows=6, is_compared=True, reason="")
    monkeypatch.setattr(flow_evidence, "_located", lambda *_: found)
    network: Any = SimpleNamespace(flows=object())
    kinds: Any = [
        SimpleNamespace(op="send", size_bytes=message_bytes),
        SimpleNamespace(op="all_reduce", size_bytes=100 - message_bytes),
    ]
    judged = flow_evidence.flow_findings(network, DiagnosisConfig(), kinds)
    assert judged is not None
    assert [fault.cause for fault in judged.faults] == causes
