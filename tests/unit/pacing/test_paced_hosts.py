"""The published table with real ranks: what jobs made by hand say of it."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.pacing.experiment import Ran, Scene, Series
from experiments.pacing.on_hosts import COUPLINGS, finding, hosts_of

NONE, INCAST = COUPLINGS[0].name, COUPLINGS[2]


def _jobs(policy: str, *, off_ms: float, on_ms: float | None, is_on: bool, coupling: str = NONE) -> Series:
    trial = {
        "outcome": "gain" if is_on else "no effect",
        "step_off_ns": off_ms * 1e6,
        "step_on_ns": None if on_ms is None else on_ms * 1e6,
        "variation_off": 0.02,
        "variation_on": None if on_ms is None else 0.03,
    }
    step_ns = np.full(100, off_ms * 1e6).astype(np.int64)
    jobs = tuple(Ran(step_ns=step_ns + seed, trial={"is_on": is_on, "trial": trial}) for seed in range(3))
    scene = Scene(name=coupling, spec=COUPLINGS[0].spec, num_ranks=4, policies={})
    return Series(scene=scene, policy=policy, ran=jobs)


def test_neighbouring_ranks_are_on_other_leaves_where_they_are_spread():
    assert hosts_of(4, is_spread=False) == ("n1", "n2", "n3", "n4")
    assert hosts_of(4, is_spread=True) == ("n1", "n3", "n2", "n4")
    assert hosts_of(32, is_spread=True)[:5] == ("n1", "n9", "n17", "n25", "n2")


def test_a_row_has_throughput_and_the_published_values_beside_it():
    found = finding([_jobs("slack", off_ms=100.0, on_ms=80.0, is_on=True)])
    row = dict(zip(*found.table, strict=True))
    assert row["throughput"].startswith("+25.0 %")
    assert row["CV"] == "0.02 to 0.03"
    assert row["published"] == "-0.6 %, 0.02 to 0.02"


@pytest.mark.parametrize("is_on", [False, True])
def test_a_trial_that_keeps_what_gains_nothing_is_seen(is_on):
    claims = finding([_jobs("slack", off_ms=100.0, on_ms=100.0, is_on=is_on)]).claims
    (switched_off,) = (claim for claim in claims if "trials end with coordination off" in claim.text)
    assert switched_off.holds is not is_on


def test_what_else_could_be_done_is_held_against_jobs_without_coordination():
    assert INCAST.instead is not None
    cases = [
        _jobs("stagger", off_ms=100.0, on_ms=99.0, is_on=False, coupling=INCAST.name),
        _jobs(INCAST.instead[0], off_ms=90.0, on_ms=None, is_on=False, coupling=INCAST.name),
    ]
    claim = finding(cases).claims[-1]
    assert claim.holds
    assert claim.text.endswith("4: 90 instead of 100 ms")
