"""Which layouts there are."""

from __future__ import annotations

import pytest

from hpcpace.core.errors import ConfigError
from hpcpace.planning.layouts import Layouts, enumerate_layouts
from hpcpace.planning.model import Transformer

MODEL = Transformer(name="m", num_layers=4, hidden=64, num_heads=4, sequence=32, vocabulary=100)


def test_all_layouts_have_the_ranks_and_the_batch() -> None:
    found = enumerate_layouts(MODEL, 8, 16)
    assert set(found.num_ranks.tolist()) == {8} and set(found.sequences.tolist()) == {16}
    sizes = set(zip(found.dp.tolist(), found.pp.tolist(), found.tp.tolist(), strict=True))
    # 8 stages or 8 ways are more than there are layers and heads.
    assert sizes == {(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4)}
    assert (found.num_micro >= found.pp).all() and (found.zero[found.pp > 1] < 3).all()
    assert (found.zero[found.dp == 1] == 0).all()


def test_groups_begin_and_end_with_a_node() -> None:
    model = Transformer(name="m", num_layers=42, hidden=84, num_heads=42, sequence=32, vocabulary=100)
    found = enumerate_layouts(model, 24, 24, gpus_per_node=8)
    for size in (found.tp, found.tp * found.pp):
        assert ((8 % size == 0) | (size % 8 == 0)).all()
    # On a single node nothing can be cut by its end.
    assert 3 in enumerate_layouts(model, 6, 6, gpus_per_node=8).tp


def test_restrictions_hold() -> None:
    found = enumerate_layouts(MODEL, 8, 16, {"tp": (2,), "zero": (1,), "micro_batch": (1, 2), "recompute": (2,)})
    assert set(found.tp.tolist()) == {2} and set(found.recompute.tolist()) == {2}
    assert set(found.micro_batch.tolist()) == {1, 2} and set(found.zero.tolist()) == {1}


@pytest.mark.parametrize(
    ("num_ranks", "batch", "only", "why"),
    [
        (8, 1, {}, "restrict dp, pp, tp and micro_batch less, or choose a larger --batch"),
        (7, 8, {}, "choose a --batch that is a multiple of 7, its replicas"),
        (8, 16, {"tp": (3,)}, "tp=3 does not divide 8 ranks: choose from 1, 2, 4, 8"),
        (8, 16, {"tp": (8,)}, "tp=8 does not divide 4 heads: choose from 1, 2, 4"),
        (8, 16, {"pp": (8,)}, "a pipeline has at most 4 stages, one for each layer"),
        (
            8,
            16,
            {"micro_batch": (5, 6)},
            "micro_batch=5,6 does not divide 16 sequences of a step: choose from 1, 2, 4, 8",
        ),
        (6, 16, {"dp": (3,)}, "dp=3 does not divide 16 sequences of a step"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(
    num_ranks: int, batch: int, only: dict[str, tuple[int, ...]], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"no layout of {num_ranks} ranks fits m .* a batch of {batch}: {why}"):
        enumerate_layouts(MODEL, num_ranks, batch, only)


def test_columns_are_checked() -> None:
    with pytest.raises(ConfigError, match="different lengths"):
        Layouts.of(dp=[1, 2], pp=[1, 2, 3])
    with pytest.raises(ConfigError, match="dp is 0: it must be at least 1"):
        Layouts.of(dp=0)
