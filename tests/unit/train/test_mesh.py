from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.errors import MeshError
from hpcpace.train.settings import Mesh, parse_mesh


def test_no_text_means_data_parallelism_over_all_ranks() -> None:
    assert parse_mesh("", 8) == Mesh(dp=8)


def test_a_dimension_that_is_not_named_is_one() -> None:
    assert parse_mesh(" pp=2 , dp=3", 6) == Mesh(dp=3, pp=2, tp=1)


def test_text_and_mesh_are_inverse() -> None:
    mesh = Mesh(dp=2, pp=3, tp=4)
    assert parse_mesh(str(mesh), 24) == mesh


def test_tensor_parallelism_is_innermost_and_data_parallelism_outermost() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert mesh.coordinates(1) == Mesh(dp=0, pp=0, tp=1)
    assert mesh.coordinates(2) == Mesh(dp=0, pp=1, tp=0)
    assert mesh.coordinates(4) == Mesh(dp=1, pp=0, tp=0)


def test_rank_is_the_inverse_of_coordinates() -> None:
    mesh = Mesh(dp=2, pp=3, tp=4)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(24)] == list(range(24))


@each_case(
    ("text", "seen"),
    [
        ("dp=0", "'dp=0'"),
        ("dp=-2", "'dp=-2'"),
        ("dp=two", "'dp=two'"),
        ("dp=²", "'dp=²'"),
        ("dp", "'dp'"),
        ("dp=2,", "''"),
        ("zz=2", "'zz=2'"),
        ("dp=2,dp=2", "twice"),
        ("dp=2;pp=2", "'dp=2;pp=2'"),
        ("dp=2,pp=2", "needs 4 ranks, but the job has 2"),
        ("tp=1", "needs 1 ranks, but the job has 2"),
    ],
)
def test_refuses_a_mesh_that_is_wrong(text: str, seen: str) -> None:
    with pytest.raises(MeshError) as caught:
        parse_mesh(text, 2)
    assert seen in str(caught.value)
