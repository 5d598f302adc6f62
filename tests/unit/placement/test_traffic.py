"""Bytes between ranks, against the messages that gloo is known to send."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hpcpace
from hpcpace.core.errors import CannotTell
from hpcpace.metrics import Floats
from hpcpace.placement.gain import MAX_RANKS, edges, traffic_per_step
from library.volume import Operation, messages
from tests.placed_run import PlacedRun, layout_operations

SIZE = 1 << 20


def sent(op: str, num: int, root: int = -1) -> Floats:
    """Return the bytes of one operation of `SIZE` bytes of all ranks."""
    traffic = np.zeros((num, num))
    source, destination, share = edges(op, np.arange(num), root)
    np.add.at(traffic, (source, destination), share * SIZE)
    return traffic


def known(operation: Operation, num: int) -> Floats:
    """Return the same by the messages of gloo."""
    traffic = np.zeros((num, num))
    for (source, destination, size_bytes), count in messages([operation]).items():
        traffic[source, destination] += count * size_bytes
    return traffic


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_edges_are_those_of_gloo_in_both_directions_together(op: str, num: int) -> None:
    truth = known(Operation(op, "", tuple(range(num)), SIZE, 4), num)
    found = sent(op, num)
    np.testing.assert_allclose(found + found.T, truth + truth.T, rtol=0.01)


def test_rings_go_in_the_order_of_the_group() -> None:
    source, destination, share = edges("reduce_scatter", np.array([1, 4, 6]), -1)
    assert (source.tolist(), destination.tolist()) == ([1, 4, 6], [4, 6, 1])
    assert share.tolist() == pytest.approx([2 / 3] * 3)


def test_a_reduce_is_a_broadcast_backwards() -> None:
    np.testing.assert_array_equal(sent("reduce", 8, root=3), sent("broadcast", 8, root=3).T)
    assert sent("broadcast", 8, root=3)[:, 3].sum() == 0


@pytest.mark.parametrize(("op", "axis"), [("gather", 0), ("scatter", 1)])
def test_a_root_has_a_share_of_each_other_member(op: str, axis: int) -> None:
    traffic = sent(op, 4, root=2)
    assert traffic.sum(axis=axis)[2] == traffic.sum() == 3 / 4 * SIZE


@pytest.mark.parametrize(("op", "num"), [("barrier", 4), ("op 99", 4), ("all_reduce", 1)])
def test_what_has_no_bytes_or_no_known_edges_sends_nothing(op: str, num: int) -> None:
    assert sent(op, num).sum() == 0


@pytest.mark.parametrize("kind", ["pp", "tp"])
def test_a_run_has_the_traffic_of_its_operations(tmp_path: Path, kind: str) -> None:
    operations = layout_operations(2, 4, kind, large=SIZE, small=SIZE // 4)
    run = PlacedRun(operations=operations, host=np.repeat(np.arange(4), 2), leaves=[1, 1, 2, 2]).write(tmp_path / "run")
    loaded = hpcpace.load(run.path)
    assert loaded.num_steps == 3
    found = traffic_per_step(loaded.columns("collectives"), 8, 3)
    truth = sum(known(operation, 8) for operation in operations)
    np.testing.assert_allclose(found + found.T, truth + truth.T, rtol=0.01)


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(MAX_RANKS + 1, 3), (4, 0), (4, 3)])
def test_without_bytes_or_with_too_many_ranks_nothing_is_known(num_ranks: int, num_steps: int) -> None:
    with pytest.raises(CannotTell):
        traffic_per_step([], num_ranks, num_steps)
