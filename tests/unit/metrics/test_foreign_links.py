from __future__ import annotations

import numpy as np
import pytest

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.flow_figures import DOWN, UP, foreign_on_links
from hpcpace.metrics.interface_use import interface_loads
from tests.simulated_links import SimulatedLinks, simulate

WINDOW = {"begin_ns": 2 * NS_PER_S, "end_ns": 20 * NS_PER_S}


def foreign(job: SimulatedLinks, is_recorded: list[bool] | None = None):
    run = simulate(job)
    known = np.array(is_recorded or [True] * job.num_hosts)
    return foreign_on_links(interface_loads(run.use, run.flows, **WINDOW, is_recorded=known), run.topology)


def test_traffic_of_others_is_what_interfaces_carried_beyond_the_job():
    job = SimulatedLinks(fault="foreign", size=0.4)
    found = foreign(job)
    assert found[1] == pytest.approx([0.4 * job.link_bps / 8] * 2, rel=0.1)
    assert found[[0, 2, 3]] == pytest.approx(0.0)


def test_what_hosts_send_beyond_what_their_leaf_receives_crosses_its_uplink():
    job = SimulatedLinks(fault="foreign", size=0.4, is_one_way=True)
    found, leaf1 = foreign(job), 4
    assert found[leaf1, UP] == pytest.approx(0.4 * job.link_bps / 8, rel=0.1)
    assert found[leaf1, DOWN] == 0.0


def test_a_healthy_job_has_none():
    assert foreign(SimulatedLinks()) == pytest.approx(0.0)


def test_a_host_without_recorded_connections_is_not_known_nor_is_its_uplink():
    found = foreign(SimulatedLinks(), [False, True, True, True])
    assert np.isnan(found[[0, 4]]).all()
    assert np.isfinite(found[[1, 2, 3, 5]]).all()
