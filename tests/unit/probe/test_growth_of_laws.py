"""Laws over numbers of hosts become the transfer term of an extrapolation: a ring, a tree, or none."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.growth import Algorithm, extrapolated_transfer
from hpcpace.probe.laws import transfer_term
from hpcpace.probe.record import LatencyLaw, LawPiece


def law_on(num_nodes: int, latency_ns: float, ns_per_byte: float) -> LatencyLaw:
    piece = LawPiece(
        from_bytes=0,
        from_low_bytes=0,
        from_high_bytes=0,
        latency_ns=latency_ns,
        latency_low_ns=latency_ns,
        latency_high_ns=latency_ns,
        ns_per_byte=ns_per_byte,
        ns_per_byte_low=ns_per_byte,
        ns_per_byte_high=ns_per_byte,
    )
    return LatencyLaw(
        op="all_reduce",
        num_nodes=num_nodes,
        num_ranks=num_nodes,
        pieces=(piece,),
        least_bytes=64,
        most_bytes=1 << 26,
        least_error=0.0,
        most_error=0.0,
        single_least_error=0.0,
        single_most_error=0.0,
    )


def test_laws_of_a_ring_extrapolate_as_a_ring_with_their_latency() -> None:
    laws = [law_on(n, 2e4 * (n - 1), 2 * (n - 1) / n) for n in (2, 4, 8)]
    term = transfer_term(laws, [("all_reduce", 1e7, 3.0)], num_nodes=8, transfer_ns=6e7)
    assert term is not None and term.algorithm == Algorithm.RING
    assert term.latency_ns == pytest.approx(3 * 2e4, rel=0.01)
    (on_16,) = extrapolated_transfer(term, 8, np.array([16]))
    assert on_16 == pytest.approx((6e7 - 3 * 7 * 2e4) * (15 / 16) / (7 / 8) + 3 * 15 * 2e4, rel=0.01)


def test_laws_of_a_tree_extrapolate_as_a_tree() -> None:
    laws = [law_on(n, 2e4 * np.log2(n), 0.5 * np.log2(n)) for n in (2, 4, 8)]
    term = transfer_term(laws, [("all_reduce", 1e6, 1.0)], num_nodes=8, transfer_ns=1e7)
    assert term is not None and term.algorithm == Algorithm.TREE


@each_case(("op", "num_nodes"), [("broadcast", 8), ("all_reduce", 3), ("all_reduce", 1)])
def test_what_was_not_probed_is_not_extrapolated(op: str, num_nodes: int) -> None:
    assert transfer_term([law_on(8, 1e4, 1.0)], [(op, 1e6, 1.0)], num_nodes=num_nodes, transfer_ns=1e7) is None
