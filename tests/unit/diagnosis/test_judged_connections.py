"""How a job's connections are judged: by the length of its messages, and by what its hosts have of their cores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import each_case

from hpcpace.diagnosis.judged import _core_wait, _message_bytes
from hpcpace.metrics.topology import topology_of

PLACES = topology_of(ranks=range(4), nodes=[0, 0, 1, 2], hosts=["n1", "n1", "n2", "n3"], addresses=[""] * 4)


@each_case(("message_bytes", "expected"), [(60, 30.0), (40, np.inf), (0, np.inf)], ids=["mostly", "partly", "none"])
def test_the_size_of_messages_counts_where_most_bytes_are_messages(message_bytes: int, expected: float) -> None:
    kinds: Any = [
        SimpleNamespace(op="send", size_bytes=message_bytes, num_rows=2),
        SimpleNamespace(op="all_reduce", size_bytes=100 - message_bytes, num_rows=7),
    ]
    assert _message_bytes(kinds) == expected


def test_a_run_without_any_operation_has_no_messages() -> None:
    assert _message_bytes([]) == np.inf


@each_case(
    ("waiting", "throttled", "expected"),
    [
        ([0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1]),
        ([0.1, 0.6, 0.3, 0.15], [0.0, 0.0, 0.0, 0.0], [0.3 + 0.1, 0.1, 0.05]),
        ([0.3, 0.1, 0.1, 0.3], [0.0, 0.0, 0.6, 0.0], [0.1, 0.3 + 0.1, 0.1]),
        ([np.nan, 0.3, 0.3, np.nan], [np.nan, 0.0, 0.0, np.nan], [0.1, 0.1, 0.0]),
        ([np.nan] * 4, [np.nan] * 4, [0.0, 0.0, 0.0]),
    ],
)
def test_a_host_lacks_cores_as_its_rank_that_waits_most_beyond_what_all_wait(
    waiting: list[float], throttled: list[float], expected: list[float]
) -> None:
    cores = SimpleNamespace(waiting=np.array(waiting), throttled=np.array(throttled))
    panels: Any = SimpleNamespace(rank=np.arange(4), cores=cores)
    assert _core_wait(PLACES, panels, 1 / 3).tolist() == pytest.approx(expected)


def test_where_cores_are_not_known_nobody_waits() -> None:
    panels: Any = SimpleNamespace(rank=np.arange(4), cores=None)
    assert not _core_wait(PLACES, panels, 1 / 3).any()
