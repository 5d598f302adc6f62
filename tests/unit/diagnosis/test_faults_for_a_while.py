"""Links that are slow, or full of others' traffic, for a part of a run: named with the steps in which they were so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.figures.network import KnownInterfaces, NetworkEvidence, NetworkThresholds, StepWindow
from hpcpace.diagnosis.finding import Case, Said
from hpcpace.diagnosis.judged import flow_findings
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.verdict import diagnose
from hpcpace.metrics.flow_figures import FlowFindings, LinkCause, Usual
from tests.simulated_links import SimulatedLinks, SimulatedRun, simulate
from tests.unit.diagnosis.test_diagnose import panels

SECONDS = 60
EIGHT = SimulatedLinks(num_hosts=8, num_leaves=4, fault="slow", size=0.3, num_seconds=SECONDS)
STEPS_PER_S = 4


def found_in(run: SimulatedRun) -> FlowFindings:
    """Return what is found in a run of which four steps begin a second."""
    num_hosts, step = len(run.use.names), np.arange(SECONDS * STEPS_PER_S)
    network = NetworkEvidence(
        window=StepWindow(
            begin_ns=0,
            end_ns=SECONDS * NS_PER_S,
            num_steps=len(step),
            step=step,
            step_begin_ns=step * NS_PER_S // STEPS_PER_S,
        ),
        places=run.topology,
        known=KnownInterfaces(use=run.use, rate_source=("device",) * num_hosts, mtu=np.full(num_hosts, 1500)),
        flows=run.flows,
        is_recorded=np.ones(num_hosts, np.bool_),
        limits=NetworkThresholds(),
    )
    found = flow_findings(network, DiagnosisConfig(), (), panels(), ThresholdValues())
    assert found is not None
    return found


def test_a_link_that_is_slow_for_a_third_of_a_job_is_named_with_its_steps_and_its_rate_then():
    wrong = []
    for job in (EIGHT, replace(EIGHT, num_hosts=4, num_leaves=2)):
        for begin, end in ((20, 40), (0, 20), (40, 60), (10, 50)):
            faults = found_in(simulate(replace(job, links=("n3",), slow_s=((begin, end),)))).faults
            first, last = faults[0].steps[0] if faults and faults[0].steps else (-99, -99)
            is_right = [(fault.cause, fault.ids) for fault in faults] == [(LinkCause.SLOW, ("n3",))]
            is_right &= abs(first - begin * STEPS_PER_S) <= 8 and abs(last - end * STEPS_PER_S) <= 8
            if not is_right or not 34e6 < faults[0].slow_bytes_per_s < 40e6:
                wrong.append((job.num_hosts, begin, end, faults))
    assert wrong == []


def test_two_stretches_of_a_link_are_one_fault_and_another_link_has_its_own():
    (fault,) = found_in(simulate(replace(EIGHT, slow_s=((10, 20), (35, 50))))).faults
    assert (fault.ids, len(fault.steps)) == (("n2",), 2)
    first, second = (
        simulate(replace(EIGHT, links=(link,), slow_s=(at,))) for link, at in (("n2", (5, 20)), ("n6", (35, 50)))
    )
    is_late = second.flows.begin_ns >= 27 * NS_PER_S
    columns = {
        name: np.where(is_late, getattr(second.flows, name), getattr(first.flows, name))
        for name in ("sent_bytes", "acked_bytes", "received_bytes", "busy_ns", "rtt_ns")
    }
    faults = found_in(replace(first, flows=replace(first.flows, **columns))).faults
    assert sorted(fault.ids for fault in faults) == [("n2",), ("n6",)]


def test_a_link_that_is_slow_all_the_time_or_comes_and_goes_or_is_well_has_no_steps():
    for job in (EIGHT, replace(EIGHT, fault="flapping"), replace(EIGHT, fault="lossy", size=0.01)):
        (fault,) = found_in(simulate(job)).faults
        assert (fault.ids, fault.steps) == (("n2",), ())
    assert found_in(simulate(replace(EIGHT, fault="none"))).faults == ()


def test_between_two_hosts_a_slower_while_is_named_by_both_links_and_a_run_that_never_changes_by_none():
    two = replace(EIGHT, num_hosts=2, num_leaves=1, links=("n2",))
    wrong = []
    for begin, end in ((20, 40), (0, 20), (40, 60), (10, 50)):
        faults = found_in(simulate(replace(two, slow_s=((begin, end),)))).faults
        first, last = faults[0].steps[0] if faults and faults[0].steps else (-99, -99)
        is_right = [(fault.cause, fault.ids, fault.usual) for fault in faults] == [
            (LinkCause.SLOW, ("n1", "n2"), Usual.REST)
        ]
        if not is_right or abs(first - begin * STEPS_PER_S) > 8 or abs(last - end * STEPS_PER_S) > 8:
            wrong.append((begin, end, faults))
    for fault in ("none", "slow", "flapping", "lossy"):
        if found := found_in(simulate(replace(two, fault=fault))).faults:
            wrong.append((fault, found))
    assert wrong == []


def test_uplinks_of_which_others_take_half_for_a_while_are_named_with_what_is_missing():
    job = replace(EIGHT, links=tuple(f"leaf{leaf} uplink" for leaf in range(1, 5)), uplink_bps=1e9, size=0.5)
    (fault,) = found_in(simulate(replace(job, slow_s=((20, 40),)))).faults
    assert (fault.cause, fault.usual, len(fault.ids)) == (LinkCause.UPLINK, Usual.REST, 4)
    missing_bytes_per_s = fault.usual_bytes_per_s - fault.slow_bytes_per_s
    assert 50e6 < missing_bytes_per_s < 70e6


def test_the_words_say_when_and_how_much():
    table = {
        (20, 40): "link n2 is slow in steps 8",
        (0, 0): "link n2 is slow and costs",
    }
    for stretch, words in table.items():
        flows = found_in(simulate(replace(EIGHT, slow_s=(stretch,) if stretch[1] else ())))
        transfer = panels(transfer_ns=lambda transfer: np.full_like(transfer, 1e8))
        case = Case(panels=replace(transfer, flows=flows))
        finding = diagnose(case).findings[0]
        assert words in finding.evidence.words(Said(finding=finding, hosts={})).headline
