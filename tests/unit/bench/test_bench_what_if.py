"""A step as the what-if analyzer reads it lasts as long as the recorded one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.bench.other_formats import Timeline, write_what_if

MS = 1_000_000
# Two buckets that overlap with computation, and the last all-reduce, which the optimizer waits for.
COMPUTE_MS, ENTER_MS, EXIT_MS = (0, 4, 6), (4, 6, 8), (5, 9, 11)
END_MS = 12
INSTANT = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad")


def timeline(rank: int) -> Timeline:
    begins_ns = 100 * MS * np.arange(2)

    def column(values_ms: tuple[int, ...]) -> np.ndarray:
        return (begins_ns[:, None] + MS * np.array(values_ms)).reshape(-1)

    return Timeline(
        rank=rank,
        num_ranks=2,
        members={0: [0, 1]},
        step_begins_ns=begins_ns,
        step_ends_ns=begins_ns + END_MS * MS,
        step=np.repeat([0, 1], 3),
        group=np.zeros(6, np.int64),
        size_bytes=np.full(6, 8),
        compute_ns=column(COMPUTE_MS),
        enter_ns=column(ENTER_MS),
        exit_ns=column(EXIT_MS),
    )


def test_a_step_is_computation_buckets_and_the_last_all_reduce(tmp_path: Path) -> None:
    num_rows = write_what_if(tmp_path, [timeline(0), timeline(1)])
    table = dict(np.load(tmp_path / "rows.npz"))
    names = table.pop("names")[table.pop("optype")]
    assert num_rows == len(names) == 2 * 2 * (1 + 3 + 2 + 6)
    of_one = (table["rank"] == 1) & (table["step"] == 1)
    taken_ms = {
        name: (1e3 * table["duration"][of_one & (names == name)]).round(6).tolist() for name in np.unique(names)
    }
    assert taken_ms == {
        "forward-compute": [2],
        "backward-compute": [2, 2, 2],
        "grads-reduce-scatter": [1, 3],
        "separate-grads-all-reduce": [2],  # from 9 ms on, when the bucket before has gone
        "optimizer": [1],
        **{name: [0] for name in INSTANT},
    }
    assert table["start_ts"][of_one].min() == 0.1
