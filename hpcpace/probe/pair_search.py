"""The search for slow links: a first set of rounds, then more where a slow pair leaves open which link it was.

The number of first rounds grows with the logarithm of the hosts, and is that of all pairs where time allows. Each
further round pairs the suspects with hosts that are fast with others. What measures a round is an argument, so that
the same search runs on a network and on a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from hpcpace.probe.follow_up import follow_up, latency_again, loaded_again
from hpcpace.probe.pair_network import PairNetwork
from hpcpace.probe.pair_results import PairResult, PairResults
from hpcpace.probe.rounds import (
    Round,
    loaded_rounds,
    rounds_across_leaves,
    rounds_one_by_one,
    rounds_within_leaves,
    some_rounds,
)

# Of the time allowed, what the first rounds may take if they are to measure all pairs.
_FULL_SHARE = 0.6

Measure = Callable[[Round], Sequence[PairResult]]


def search_slow_links(
    network: PairNetwork, measure: Measure, *, num_affordable: int, is_over: Callable[[], bool]
) -> PairResults:
    """Measure the first rounds, then those that open questions need, and return all results.

    Args:
        network: hosts and leaf switches.
        measure: measures the pairs of one round; hosts that do not answer have nan.
        num_affordable: how many rounds the allowed time has room for.
        is_over: whether it has passed; asked before each round.
    """
    results = PairResults(network)
    rounds = first_rounds(network, num_affordable)
    while rounds:
        for round_ in rounds:
            if is_over():
                return results
            results.add(round_, measure(round_))
        rounds = follow_up(results) or loaded_again(results) or latency_again(results)
    return results


def first_rounds(network: PairNetwork, num_affordable: int) -> list[Round]:
    """Return the rounds that are measured whatever they show.

    Args:
        network: hosts and leaf switches.
        num_affordable: rounds for which there is time; all pairs are measured where they take 60 % of it at most.
    """
    some = some_rounds(network)
    loaded = [round_ for round_ in loaded_rounds(network, some) if not round_.is_apart]
    if network.is_known:
        loaded *= 2  # a disturbance during one round counts much where few switches are compared
    room = max(int(_FULL_SHARE * num_affordable) - len(loaded), 0)
    if not network.is_known:
        apart = list(islice(rounds_one_by_one(network), room + 1))
        return [*apart, *loaded] if len(apart) <= room else loaded_rounds(network, some)
    apart = _rounds_apart(network, room + 1)
    return [*(apart if len(apart) <= room else _rounds_apart(network, some)), *loaded]


def _rounds_apart(network: PairNetwork, most: int) -> list[Round]:
    """Return rounds that share no link, at most so many within switches, and as many across."""
    return [*rounds_within_leaves(network, most), *rounds_across_leaves(network, most)]
