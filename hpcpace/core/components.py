"""Strongly connected components: which vertices of a directed graph reach each other."""

from __future__ import annotations

from collections.abc import Iterable


def strong_components(num_vertices: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the component of each vertex, numbered from 0, in time linear in vertices and edges.

    The components of an undirected graph are those of a graph with each edge in both directions. Tarjan's method
    (SIAM Journal on Computing 1, 1972), without recursion: chains of thousands of ranks are usual.
    """
    followers: list[list[int]] = [[] for _ in range(num_vertices)]
    for source, target in edges:
        followers[source].append(target)
    component = [-1] * num_vertices
    order = [-1] * num_vertices  # in which vertices were found
    lowest = [0] * num_vertices  # order of the first vertex, not yet in a component, that is known to be reached
    num_found = num_components = 0
    open_vertices: list[int] = []
    for root in range(num_vertices):
        path = [root] if order[root] < 0 else []
        while path:
            vertex = path[-1]
            if order[vertex] < 0:
                order[vertex] = lowest[vertex] = num_found
                num_found += 1
                open_vertices.append(vertex)
            if followers[vertex]:
                follower = followers[vertex].pop()
                if order[follower] < 0:
                    path.append(follower)
                elif component[follower] < 0:
                    lowest[vertex] = min(lowest[vertex], order[follower])
                continue
            path.pop()
            if path:
                lowest[path[-1]] = min(lowest[path[-1]], lowest[vertex])
            if lowest[vertex] == order[vertex]:
                while component[vertex] < 0:
                    component[open_vertices.pop()] = num_components
                num_components += 1
    return component
