from __future__ import annotations

import numpy as np
from cases import each_case

from hpcpace.metrics.kernels import grouped_medians, stable_order


@each_case("num_groups", [1, 7, 1 << 17])
def test_each_group_has_the_median_of_its_values(num_groups):
    rng = np.random.default_rng(num_groups)
    number, value = rng.integers(0, num_groups, 1000), rng.normal(size=1000)
    found = grouped_medians(number, value, num_groups)
    for group in np.unique(number).tolist():
        assert found[group] == np.median(value[number == group])
    assert not found[np.setdiff1d(np.arange(num_groups), number)].any()


@each_case("bits", [0, 1, 15, 16, 17, 32, 33, 48, 49, 62])
@each_case("num_values", [0, 1, 500])
def test_equal_numbers_keep_their_order(bits, num_values):
    rng = np.random.default_rng(bits)
    number = rng.integers(0, 1 << bits, num_values)
    number[num_values // 2 :] = number[: num_values - num_values // 2]
    assert stable_order(number).tolist() == np.argsort(number, kind="stable").tolist()
