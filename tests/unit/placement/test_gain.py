"""What a placement does to the step time, for runs whose links are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hpcpace
from experiments.synthetic_run import MS
from hpcpace.metrics import Ints
from hpcpace.metrics.operations import MESSAGES, is_one_of
from hpcpace.placement.gain import Kinds, Loads, kinds_of
from hpcpace.placement.of_run import Placement, place_run
from tests.placed_run import PlacedRun, layout_operations

LEAVES = [1, 1, 2, 2]
GROUPS_OVER_LEAVES = np.array([0, 2, 1, 3, 1, 3, 0, 2])
LARGE, SMALL = 4_000_000, 100_000
HOST_NS, UPLINK_NS = 1.0, 4.0
"""What a link takes for a byte."""
STEP_NS = 200 * MS


def placed(path: Path, host: Ints = GROUPS_OVER_LEAVES, num_steps: int = 20) -> Placement:
    """Return the placement for two groups of four ranks over both leaves, and four pairs below one leaf each.

    Two edges of either group cross each uplink, with 2 * 3 / 4 of its bytes; two pairs leave each host at once.
    """
    lengths_ns = [4 * 1.5 * LARGE * UPLINK_NS] * 2 + [2 * SMALL * HOST_NS] * 4
    run = PlacedRun(
        operations=layout_operations(2, 4, "tp", large=LARGE, small=SMALL),
        host=host,
        leaves=LEAVES,
        num_steps=num_steps,
        lengths_ns=[round(length_ns) for length_ns in lengths_ns],
    )
    return place_run(hpcpace.load(run.write(path / "run").path))


def test_transfers_take_what_their_busiest_links_need(tmp_path: Path) -> None:
    gain = placed(tmp_path).gain
    assert gain is not None and not gain.is_bound
    # Each group is below one leaf then, and all pairs cross the uplinks at once.
    saved_ns = 4 * 1.5 * LARGE * UPLINK_NS - 1.5 * LARGE * HOST_NS
    lost_ns = 4 * SMALL * UPLINK_NS - 2 * SMALL * HOST_NS
    assert gain.share.value == pytest.approx((saved_ns - lost_ns) / STEP_NS, rel=0.01)
    # The transfers on the new links may take 1.4 times as long, or the prediction may be 1.4 times too long.
    new_ns = 1.5 * LARGE * HOST_NS + 4 * SMALL * UPLINK_NS
    assert gain.share.value - gain.share.low == pytest.approx(0.4 * new_ns / STEP_NS, rel=0.02)
    assert gain.share.high - gain.share.value == pytest.approx((1 - 1 / 1.4) * new_ns / STEP_NS, rel=0.02)


def test_few_steps_give_no_interval(tmp_path: Path) -> None:
    gain = placed(tmp_path, num_steps=6).gain
    assert gain is not None and (gain.share.low, gain.share.high) == (-np.inf, np.inf)


def test_a_bound_where_no_link_of_a_host_is_seen(tmp_path: Path) -> None:
    pairs_over_leaves = np.array([0, 2, 1, 3, 2, 0, 3, 1])
    gain = placed(tmp_path, pairs_over_leaves).gain
    assert gain is not None and gain.is_bound
    assert 0 < gain.share.low <= gain.share.value <= gain.share.high


def kinds(*edges: tuple[int, int, int, float], beside: float = 1.0) -> Kinds:
    """Return kinds of one family from the kind, source, destination and share of each edge."""
    kind, source, destination, share = (np.array(column) for column in zip(*edges, strict=True))
    num = int(kind.max()) + 1
    family, part = np.zeros(num, np.int64), np.full(num, beside)
    return Kinds(family=family, beside=part, kind=kind, source=source, destination=destination, share=share)


def test_groups_that_transfer_at_once_share_their_links() -> None:
    both = ((0, 0, 2, 1.0), (1, 1, 3, 0.5))
    leaf = np.array([0, 0, 1, 1])
    assert kinds(*both).busiest(leaf).tolist() == [1.5, 1.5]
    assert kinds(*both, beside=0.5).busiest(leaf).tolist() == [1.0, 0.75]


def test_edges_within_a_host_or_below_a_switch_pass_no_link() -> None:
    found = Loads.of(kinds((0, 0, 1, 1.0), (1, 0, 2, 1.0)), np.array([0, 0, 1]), [np.array([0, 0])])
    assert (found.host.tolist(), found.uplink.tolist()) == ([0.0, 1.0], [0.0, 0.0])


def test_the_slower_of_both_links_decides() -> None:
    loads = Loads(host=np.array([2.0, 1.0]), uplink=np.array([0.0, 1.0]))
    assert loads.time_ns(1.0, 4.0).tolist() == [2.0, 4.0]


def test_messages_are_edges_and_those_of_unknown_ranks_are_left_out(tmp_path: Path) -> None:
    operations = layout_operations(2, 4, "pp", large=LARGE, small=SMALL)
    written = PlacedRun(operations=operations, host=GROUPS_OVER_LEAVES, leaves=LEAVES).write(tmp_path / "run")
    close_up = hpcpace.load(written.path).judged.measured.close_up
    assert close_up is not None
    done, transfer_ns = close_up.evidence.operations, close_up.evidence.waits.transfer_ns
    found, kind = kinds_of(done, transfer_ns)
    is_message = is_one_of(done.op, MESSAGES)
    of_first = [found.kind.tolist().index(one) for one in kind[is_message].tolist()]
    ends = np.sort(np.stack([found.source[of_first], found.destination[of_first]]), axis=0)
    assert (ends == np.sort(np.stack([done.rank, done.peer])[:, is_message], axis=0)).all() and (kind >= 0).all()
    unknown = replace(done, peer=np.where(is_message, -1, done.peer))
    assert ((kinds_of(unknown, transfer_ns)[1] < 0) == is_message).all()
