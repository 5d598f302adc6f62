"""Links of a machine from a probe."""

from __future__ import annotations

from dataclasses import replace

import pytest
from probe_sample import made_law, made_probe

from hpcpace.planning.engine import Job
from hpcpace.planning.files import read_machine
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import with_links
from hpcpace.planning.model import MeasuredModel
from hpcpace.planning.steps import steps_of

SIZE = 16_000_000


def test_an_all_reduce_takes_as_long_as_in_the_probe() -> None:
    known = with_links(read_machine("a100"), made_probe())
    machine = replace(known.machine, gpus_per_node=1)
    model = MeasuredModel(name="m", gradient_bytes=SIZE, forward_s=0.0, backward_s=0.0, update_s=0.0)
    for nodes in (2, 4):
        law = made_law("all_reduce", nodes)
        took_s = steps_of(Job(model=model, machine=machine, overlaps=False), Layouts.of(dp=nodes)).step_s[0]
        # The law of four nodes decides; the sample's all-reduce takes 0.9 ns a byte on two nodes, too.
        assert took_s == pytest.approx(law.time_ns(SIZE) / 1e9 * (1 if nodes == 4 else 2 / 3), rel=0.02)


def test_the_law_within_a_node_is_that_of_its_ranks() -> None:
    inner = replace(made_law("all_reduce", 2), num_nodes=1, num_ranks=8)
    machine = with_links(read_machine("a100"), made_probe(laws=(inner,))).machine
    assert machine.node_rate == pytest.approx(2 * 7 / 8 / 0.9e-9, rel=0.01)


def test_what_the_probe_does_not_show_is_said() -> None:
    known = with_links(read_machine("a100"), made_probe(laws=()))
    assert known.machine == read_machine("a100").machine
    assert known.remarks == ("the probe has no all-reduce between nodes: that rate is that of a known machine",)
