from __future__ import annotations

import numpy as np

from hpcpace.metrics.topology import strong_components


def test_components_are_the_vertices_that_reach_each_other() -> None:
    random = np.random.default_rng(5)
    for num_vertices in (1, 2, 7, 12):
        for num_edges in (0, num_vertices, 2 * num_vertices):
            edges = random.integers(0, num_vertices, (num_edges, 2)).tolist()
            reaches = np.eye(num_vertices, dtype=bool)
            for source, target in edges:
                reaches[source, target] = True
            for _ in range(num_vertices):
                reaches |= reaches @ reaches
            component = np.array(strong_components(num_vertices, map(tuple, edges)))
            assert (np.equal.outer(component, component) == (reaches & reaches.T)).all()
            assert sorted(set(component.tolist())) == list(range(component.max() + 1))


def test_a_long_circle_is_one_component_and_a_long_chain_none() -> None:
    chain = [(one, one + 1) for one in range(99_999)]
    assert set(strong_components(100_000, [*chain, (99_999, 0)])) == {0}
    assert len(set(strong_components(100_000, chain))) == 100_000
    assert strong_components(0, []) == []
