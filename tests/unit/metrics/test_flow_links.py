"""Links named by a job's own connections, in simulated rings whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from scipy.stats import hypergeom

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.flow_figures import FlowFigures, FlowFindings, LinkCause, Usual, flow_figures
from hpcpace.metrics.flow_job import FlowLimits
from hpcpace.metrics.flows import Flows
from hpcpace.metrics.link_faults import BETWEEN_SWITCHES, _stall_chance
from tests.simulated_links import LIMITS, SimulatedLinks, locate_by_flows, located, random_job, simulate

EIGHT = SimulatedLinks(num_hosts=8, num_leaves=4)
WINDOW = {"begin_ns": 2 * NS_PER_S, "end_ns": 20 * NS_PER_S}


def named(found: FlowFindings) -> list[tuple[LinkCause, tuple[str, ...]]]:
    return [(fault.cause, fault.ids) for fault in found.faults]


def figures_of(job: SimulatedLinks, **changed: object) -> FlowFigures:
    """Return the figures of a simulated job after some columns of its flows were replaced."""
    run = simulate(job)
    return flow_figures(replace(run.flows, **changed), run.topology, **WINDOW)


def locate(job: SimulatedLinks, figures: FlowFigures, limits: FlowLimits = LIMITS) -> FlowFindings:
    topology = simulate(job).topology
    nothing = np.full((len(topology.links), 2), np.nan)
    return locate_by_flows(figures, topology, foreign_bytes_per_s=nothing, limits=limits)


@each_case("job", [SimulatedLinks(), EIGHT, SimulatedLinks(num_leaves=1)])
@each_case(
    ("fault", "size", "cause"),
    [
        ("slow", 0.1, LinkCause.SLOW),
        ("foreign", 0.45, LinkCause.FOREIGN),
        ("flapping", 0.0, LinkCause.FLAPPING),
        ("lossy", 0.01, LinkCause.LOSSY),
        ("reordering", 0.01, LinkCause.REORDERING),
        ("small_mtu", 0.0, LinkCause.SMALL_MTU),
    ],
)
def test_names_the_link_of_a_host_and_what_is_wrong_with_it(job, fault, size, cause):
    assert named(located(replace(job, fault=fault, size=size))) == [(cause, ("n2",))]


def test_packets_that_overtake_each_other_are_told_from_losses_though_they_are_held_up_as_in_a_queue():
    job = replace(EIGHT, fault="reordering", size=0.01)
    flows = simulate(job).flows
    is_hit = flows.retransmitted_bytes > 0.005 * flows.sent_bytes
    late = figures_of(job, rtt_ns=np.where(is_hit, flows.rtt_ns * 10, flows.rtt_ns))
    assert named(locate(job, late)) == [(LinkCause.REORDERING, ("n2",))]
    unknown = figures_of(job, duplicate_segments=None)
    assert named(locate(job, unknown)) == [(LinkCause.LOSSY, ("n2",))]


def test_names_a_slow_uplink_among_four():
    found = located(replace(EIGHT, fault="slow", size=0.1, links=("leaf2 uplink",)))
    assert named(found) == [(LinkCause.UPLINK, ("leaf2 uplink",))]


def test_of_two_leaves_names_both_uplinks_because_every_connection_between_them_passes_both():
    found = located(SimulatedLinks(fault="slow", size=0.1, links=("leaf2 uplink",)))
    assert named(found) == [(LinkCause.UPLINK, ("leaf1 uplink", "leaf2 uplink"))]


def test_a_want_of_cores_that_hosts_have_within_a_leaf_too_does_not_explain_slow_uplinks():
    job = SimulatedLinks(fault="slow", size=0.1, links=("leaf2 uplink",))
    figures, crossing = figures_of(job), figures_of(job).is_crossing(simulate(job).topology)
    for where, is_named in ((1.0, True), (np.where(crossing, 1.0, 0.0), False)):
        found = named(locate(job, replace(figures, core_wait=where * np.ones(len(figures)))))
        assert (found == [(LinkCause.UPLINK, ("leaf1 uplink", "leaf2 uplink"))]) is is_named


def test_uplinks_that_give_half_of_what_hosts_give_are_a_design_and_no_fault():
    job = SimulatedLinks(uplink_bps=5e8)
    found = located(job)
    assert found.faults == () and found.is_compared
    assert found.crossing_factor == pytest.approx(2.0, abs=0.2)
    figures = figures_of(job)
    limits = replace(LIMITS, uplink_factor=1.5)
    assert named(locate(job, figures, limits)) == [(LinkCause.UPLINK, ("leaf1 uplink", "leaf2 uplink"))]


@each_case(("uplink_bps", "beyond", "is_named"), [(2.6e8, 2.0, True), (2.6e8, 1.0, False), (5e8, 2.0, False)])
def test_few_bytes_that_pass_faster_than_the_line_show_that_it_is_reached(uplink_bps, beyond, is_named):
    job = SimulatedLinks(uplink_bps=uplink_bps)
    figures, topology = figures_of(job), simulate(job).topology
    is_within = ~figures.is_crossing(topology)
    line = np.log(job.link_bps / 8)
    figures = replace(
        figures,
        log_rate=np.where(is_within, line + np.log(beyond), figures.log_rate),
        most_log_rate=np.where(is_within, line + np.log(beyond), figures.most_log_rate),
        error=np.where(is_within, 0.25, figures.error),
    )
    nothing = np.full((len(topology.links), 2), np.nan)
    rates = {"line_rate_bps": np.full(job.num_hosts, job.link_bps), "limits": LIMITS}
    found = named(locate_by_flows(figures, topology, foreign_bytes_per_s=nothing, **rates))
    assert found == ([(LinkCause.UPLINK, ("leaf1 uplink", "leaf2 uplink"))] if is_named else [])


def test_names_nothing_where_all_links_are_at_their_rate():
    found = located(SimulatedLinks(num_hosts=8, num_leaves=4, link_bps=1e8, uplink_bps=2e8, compute_s=0.01))
    assert found.faults == () and found.is_compared


def test_the_rate_of_the_line_says_that_a_link_is_full():
    job = SimulatedLinks(num_hosts=8, num_leaves=4)
    run = simulate(job)
    figures = flow_figures(run.flows, run.topology, **WINDOW)
    nothing = np.full((len(run.topology.links), 2), np.nan)
    found = locate_by_flows(figures, run.topology, foreign_bytes_per_s=nothing, line_rate_bps=np.full(8, job.link_bps))
    assert found.line_share == pytest.approx(1.0, abs=0.1)
    assert locate_by_flows(figures, run.topology, foreign_bytes_per_s=nothing).line_share is None


def test_the_rate_of_the_line_is_known_though_two_hosts_have_no_links_to_compare():
    job = SimulatedLinks(num_hosts=2, num_leaves=1)
    run = simulate(job)
    figures = flow_figures(run.flows, run.topology, **WINDOW)
    nothing = np.full((len(run.topology.links), 2), np.nan)
    found = locate_by_flows(figures, run.topology, foreign_bytes_per_s=nothing, line_rate_bps=np.full(2, job.link_bps))
    assert (found.faults, found.is_compared) == ((), False)
    assert found.line_share == pytest.approx(1.0, abs=0.1)
    assert found.line_s == pytest.approx(found.line_share * figures.busy_s.max(), rel=0.1)


def test_of_two_hosts_the_one_with_the_lower_line_rate_is_named_where_it_is_full():
    job = SimulatedLinks(num_hosts=2, num_leaves=1, fault="slow", size=0.3, links=("n2",))
    run = simulate(job)
    figures = flow_figures(run.flows, run.topology, **WINDOW)
    nothing = np.full((len(run.topology.links), 2), np.nan)
    line = np.array([1e9, 3e8])
    (fault,) = locate_by_flows(figures, run.topology, foreign_bytes_per_s=nothing, line_rate_bps=line).faults
    assert (fault.cause, fault.ids, fault.usual) == (LinkCause.SLOW, ("n2",), Usual.LINE)


def test_a_link_that_is_slow_in_one_direction_is_told_by_the_acknowledgements_that_queue_in_front_of_it():
    job = SimulatedLinks(fault="slow", size=0.1, is_one_way=True)
    (fault,) = located(job).faults
    assert (fault.cause, fault.ids, fault.direction) == (LinkCause.SLOW, ("n2",), "up")
    # Without: n2 sends to n1 alone, so its link on the way up and that of n1 on the way down carry the same.
    flows = simulate(job).flows
    (fault,) = locate(job, figures_of(job, rtt_ns=flows.least_rtt_ns * 40)).faults
    assert (fault.cause, fault.ids) == (LinkCause.SLOW, ("n1", "n2"))


def test_names_two_slow_links():
    found = located(replace(EIGHT, fault="slow", size=0.1, links=("n2", "n6")))
    assert sorted(named(found)) == [(LinkCause.SLOW, ("n2",)), (LinkCause.SLOW, ("n6",))]


def test_two_slow_links_next_to_each_other_are_both_named_though_a_connection_passes_both():
    wrong = []
    for job in (SimulatedLinks(), EIGHT, SimulatedLinks(num_leaves=1), SimulatedLinks(num_hosts=8, num_leaves=2)):
        for pair in (("n2", "n3"), ("n1", f"n{job.num_hosts}")):
            found = named(located(replace(job, fault="slow", size=0.1, links=pair)))
            if sorted(found) != [(LinkCause.SLOW, (name,)) for name in sorted(pair)]:
                wrong.append((job.num_hosts, job.num_leaves, pair, found))
    assert wrong == []


def test_the_only_two_hosts_of_a_leaf_are_not_told_from_one_of_them_and_their_uplink():
    (fault,) = located(replace(EIGHT, fault="slow", size=0.1, links=("n1", "n2"))).faults
    assert fault.ids == ("n1", "n2", "leaf1 uplink") and not fault.is_one_enough


def test_two_slow_links_that_every_connection_passes_show_only_next_to_the_line_rate_of_others():
    job = SimulatedLinks(fault="slow", size=0.3, links=("n2", "n4"))
    run = simulate(job)
    figures = flow_figures(run.flows, run.topology, **WINDOW)
    nothing = np.full((len(run.topology.links), 2), np.nan)
    assert locate(job, figures).faults == ()
    line = np.array([1e9, 3e8, 1e9, 3e8])
    found = locate_by_flows(figures, run.topology, foreign_bytes_per_s=nothing, line_rate_bps=line)
    assert sorted(named(found)) == [(LinkCause.SLOW, ("n2",)), (LinkCause.SLOW, ("n4",))]
    assert {fault.usual for fault in found.faults} == {Usual.LINE}


def test_a_link_with_latency_is_named_with_how_much_it_adds():
    wrong = []
    for job in (SimulatedLinks(), EIGHT, SimulatedLinks(num_leaves=1)):
        for links in (("n3",), ("n1", "n4"), ("n2", "n3")):
            found = located(replace(job, fault="latency", size=0.02, links=links)).faults
            seen = sorted((fault.cause, fault.ids, round(fault.latency_s, 4), fault.direction) for fault in found)
            if seen != [(LinkCause.LATENCY, (name,), 0.02, "") for name in links]:
                wrong.append((job.num_hosts, job.num_leaves, links, seen))
    assert wrong == []


def test_a_latency_like_that_of_switches_is_no_fault():
    job = replace(EIGHT, fault="latency", size=4e-4, links=("leaf2 uplink",))
    assert located(job).faults == ()


def test_round_trips_that_were_not_recorded_are_not_compared():
    job = replace(EIGHT, fault="latency", size=0.02, links=("n3",))
    run = simulate(job)
    unknown = np.where(run.flows.connections.node[run.flows.connection] == 6, 0, run.flows.least_rtt_ns)
    assert named(locate(job, figures_of(job, least_rtt_ns=unknown))) == [(LinkCause.LATENCY, ("n3",))]
    nothing = figures_of(job, least_rtt_ns=run.flows.least_rtt_ns * 0)
    assert LinkCause.LATENCY not in [fault.cause for fault in locate(job, nothing).faults]


def test_a_lossy_link_is_named_once_though_one_of_its_connections_stays_below_the_threshold():
    for job in (SimulatedLinks(), EIGHT):
        job = replace(job, fault="lossy", size=0.0035, links=("n3",))
        flows = simulate(job).flows
        is_less = flows.connections.node[flows.connection] == 3
        again = np.where(is_less, flows.retransmitted_bytes * 4 // 10, flows.retransmitted_bytes)
        assert named(locate(job, figures_of(job, retransmitted_bytes=again))) == [(LinkCause.LOSSY, ("n3",))]


def test_losses_in_bursts_are_those_of_a_queue_and_accuse_no_link():
    job = replace(EIGHT, fault="lossy", size=0.0035, links=("n3",))
    flows = simulate(job).flows
    is_burst = flows.begin_ns // NS_PER_S % 3 == 0
    again = np.where(is_burst, flows.retransmitted_bytes * 3, 0)
    assert locate(job, figures_of(job, retransmitted_bytes=again)).faults == ()


def test_the_direction_of_a_slow_link_shows_though_acknowledgements_hold_up_the_other_one():
    for factor, direction in ((1.4, "up"), (1.0, "")):
        job = replace(EIGHT, fault="slow", size=0.1, links=("n2",))
        flows = simulate(job).flows
        is_down = flows.connections.node[flows.connection] == 2
        busy_ns = np.where(is_down, (flows.busy_ns / factor).astype(np.int64), flows.busy_ns)
        (fault,) = locate(job, figures_of(job, busy_ns=busy_ns)).faults
        assert (fault.cause, fault.ids, fault.direction) == (LinkCause.SLOW, ("n2",), direction)
        assert bool(fault.other_way_bytes_per_s) == bool(direction)


def test_connections_that_fill_the_line_are_not_slow_next_to_buffers_that_take_more():
    job = SimulatedLinks(num_hosts=8, num_leaves=4, link_bps=1e8, uplink_bps=2e8)
    flows = simulate(job).flows
    is_short = flows.connections.node[flows.connection] > 3
    figures = figures_of(job, busy_ns=np.where(is_short, flows.busy_ns // 4, flows.busy_ns))
    nothing = np.full((12, 2), np.nan)
    found = locate_by_flows(
        figures, simulate(job).topology, foreign_bytes_per_s=nothing, line_rate_bps=np.full(8, job.link_bps)
    )
    assert found.faults == ()
    assert locate(job, figures).faults != ()


def test_the_effect_is_how_much_longer_bytes_take_than_on_other_links():
    (fault,) = located(SimulatedLinks(fault="slow", size=0.25)).faults
    low, high = fault.effect.interval
    assert fault.effect.value == pytest.approx(3.0, rel=0.15) and low <= 3.0 <= high
    assert fault.slow_bytes_per_s == pytest.approx(0.25 * 1e9 / 8, rel=0.1)


def test_a_link_that_is_slower_than_its_foreign_traffic_explains_may_be_slow_as_well():
    slow = SimulatedLinks(fault="slow", size=0.2)
    run = simulate(slow)
    figures = flow_figures(run.flows, run.topology, **WINDOW)
    foreign = np.zeros((len(run.topology.links), 2))
    foreign[1] = 0.15 * slow.link_bps / 8
    (fault,) = locate_by_flows(figures, run.topology, foreign_bytes_per_s=foreign).faults
    assert (fault.cause, fault.is_certain) == (LinkCause.FOREIGN, False)


def test_without_known_switches_what_is_between_them_is_suspected_unless_one_link_explains_all():
    host = located(SimulatedLinks(fault="slow", size=0.1, has_leaves=False))
    assert named(host) == [(LinkCause.SLOW, ("n2",))]
    uplink = located(replace(EIGHT, fault="slow", size=0.1, links=("leaf2 uplink",), has_leaves=False))
    assert all(BETWEEN_SWITCHES in fault.ids for fault in uplink.faults) and uplink.faults


def test_says_that_between_two_hosts_nothing_is_compared():
    found = located(SimulatedLinks(num_hosts=2, num_leaves=1, fault="slow"))
    assert (found.faults, found.is_compared) == ((), False)
    assert found.reason == "no two TCP connections of a kind pass different links"


def test_connections_that_their_receivers_hold_back_accuse_no_link():
    job = SimulatedLinks(fault="slow", size=0.1)
    flows: Flows = simulate(job).flows
    figures = figures_of(job, receiver_limited_ns=flows.busy_ns // 2)
    assert locate(job, figures).faults == ()


def test_a_host_that_lacks_cores_accuses_neither_its_own_link_nor_those_of_others_that_wait_for_it():
    job = SimulatedLinks(fault="slow", size=0.1)
    run = simulate(job)
    figures = flow_figures(run.flows, run.topology, **WINDOW, core_wait=np.array([0.02, 0.95, 0.02, 0.02]))
    assert locate(job, figures).faults == ()


def test_connections_with_little_data_accuse_no_link():
    job = SimulatedLinks(fault="slow", size=0.1)
    flows = simulate(job).flows
    found = locate(job, figures_of(job, acked_bytes=flows.acked_bytes // 10_000))
    assert (found.faults, found.is_compared) == ((), False)
    assert found.reason == "fewer than two TCP connections between hosts carried enough to be compared"


def test_the_links_of_a_host_without_records_are_judged_by_those_of_its_peers():
    job = SimulatedLinks(fault="slow", size=0.1)
    flows = simulate(job).flows
    is_left = flows.connections.node[flows.connection] != 1
    columns = {name: value[is_left] for name, value in vars(flows).items() if isinstance(value, np.ndarray)}
    found = locate(job, figures_of(job, **columns))
    assert [fault.cause for fault in found.faults] == [LinkCause.SLOW]
    assert "n2" in found.faults[0].ids


def test_connections_whose_acknowledgements_pass_foreign_traffic_accuse_nothing_else():
    job = SimulatedLinks(num_hosts=8, num_leaves=4, fault="foreign", size=0.4, is_one_way=True)
    flows = simulate(job).flows
    # n3 sends to n2, whose acknowledgements go up the link of n2, and is slow for that.
    is_returning = flows.connections.node[flows.connection] == 2
    figures = figures_of(job, busy_ns=np.where(is_returning, flows.busy_ns * 2, flows.busy_ns))
    foreign = np.zeros((12, 2))
    foreign[1, 0] = 0.4 * job.link_bps / 8
    found = locate_by_flows(figures, simulate(job).topology, foreign_bytes_per_s=foreign)
    assert named(found) == [(LinkCause.FOREIGN, ("n2",))]
    assert named(locate(job, figures)) != [(LinkCause.FOREIGN, ("n2",))]


@each_case("seed", range(40))
def test_names_nothing_in_healthy_jobs_of_any_shape_and_noise(seed):
    job = random_job(seed, "none", is_uplink=False)
    assert located(replace(job, noise=(0.03, 0.1)[seed % 2])).faults == ()


@each_case("fault", ["slow", "foreign", "flapping", "lossy", "reordering", "small_mtu"])
def test_never_names_a_wrong_link_alone(fault):
    for seed in range(12):
        job = random_job(seed, fault, is_uplink=seed % 3 == 0)
        assert all(set(job.right_links) & set(found.ids) for found in located(job).faults), job


def test_foreign_traffic_is_named_where_it_fills_the_line_though_all_others_wait_and_look_as_slow():
    job = SimulatedLinks(num_hosts=4, num_leaves=1, fault="foreign", size=0.4, is_one_way=True)
    run = simulate(job)
    flows = run.flows
    # As in a real ring: the others send in pieces, whose rate is little above that of the slow connection.
    is_other = flows.connections.node[flows.connection] != 1
    figures = figures_of(job, busy_ns=np.where(is_other, (flows.busy_ns * 1.6).astype(np.int64), flows.busy_ns))
    foreign = np.zeros((4, 2))
    foreign[1, 0] = 0.4 * job.link_bps / 8
    unknown = locate_by_flows(figures, run.topology, foreign_bytes_per_s=foreign)
    assert unknown.faults == ()
    line = locate_by_flows(figures, run.topology, foreign_bytes_per_s=foreign, line_rate_bps=np.full(4, job.link_bps))
    (fault,) = line.faults
    assert (fault.cause, fault.ids, fault.is_certain) == (LinkCause.FOREIGN, ("n2",), True)
    assert fault.effect.value == pytest.approx(0.4 / 0.6, rel=0.15)


def test_foreign_traffic_that_leaves_room_for_the_job_is_no_fault():
    job = SimulatedLinks(num_leaves=1)
    run = simulate(job)
    foreign = np.zeros((4, 2))
    foreign[1, 0] = 0.15 * job.link_bps / 8
    found = locate_by_flows(
        flow_figures(run.flows, run.topology, **WINDOW),
        run.topology,
        foreign_bytes_per_s=foreign,
        line_rate_bps=np.full(4, 2 * job.link_bps),
    )
    assert found.faults == ()


@each_case(
    ("count", "intervals", "all_stalls", "all_intervals"),
    [(0, 10, 5, 100), (3, 40, 5, 200), (4, 300, 17, 11_462), (226, 1023, 2005, 32_796), (5, 8, 7, 10), (6, 8, 5, 10)],
)
def test_the_chance_of_stalls_is_hypergeometric(
    count: int, intervals: int, all_stalls: int, all_intervals: int
) -> None:
    expected = hypergeom.sf(count - 1, all_intervals, all_stalls, intervals)
    assert _stall_chance(count, intervals, all_stalls, all_intervals) == pytest.approx(expected, rel=1e-10, abs=1e-300)
