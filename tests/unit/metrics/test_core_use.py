from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.host_waits import core_use, cpus_of, held_up
from hpcpace.trace.schema import TABLES

S = 1_000_000_000
SECONDS = 11


def rows(running=0.5, queued=0.25, **rates):
    """Return a table of ten seconds in which counters grow by so many nanoseconds a nanosecond."""
    table = np.zeros(SECONDS, TABLES["host"].dtype)
    table["time_ns"] = np.arange(SECONDS) * S
    for name, rate in {"cpu_time_ns": running, "run_wait_ns": queued, **rates}.items():
        table[name] = np.arange(SECONDS) * rate * S
    return table


def use(*tables, begin=0, end=10 * S, cpus="0-1"):
    return core_use(tables, [begin] * len(tables), [end] * len(tables), [cpus] * len(tables))


def test_one_thread_waits_for_what_the_kernel_counted():
    found = use(rows(running=0.5, queued=0.25))
    assert (found.running[0], found.queued[0]) == pytest.approx((0.5, 0.25))
    assert found.waiting[0] == pytest.approx(0.25)


@each_case(
    ("running", "queued", "share"),
    [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (1.0, 3.0, 0.75), (2.0, 2.0, 0.5), (0.2, 0.1, 0.1)],
)
def test_several_waiting_threads_hold_their_rank_up_for_at_most_all_of_the_time(running, queued, share):
    assert held_up(np.array([running]), np.array([queued]))[0] == pytest.approx(share)


def test_only_the_time_asked_for_counts():
    table = rows(queued=0.0)
    table["run_wait_ns"][:] = np.where(np.arange(SECONDS) < 5, 0, (np.arange(SECONDS) - 5) * S // 2) + 1
    assert use(table, begin=0, end=4 * S).waiting[0] == pytest.approx(0.0, abs=1e-6)
    assert use(table, begin=5 * S).waiting[0] == pytest.approx(0.5)


def test_pressure_throttling_and_switches_are_rates():
    table = rows(cpu_pressure_ns=0.8, cpu_throttled_ns=0.3)
    table["involuntary_switches"] = np.arange(SECONDS) * 40
    found = use(table)
    assert (found.pressure[0], found.throttled[0], found.switches[0]) == pytest.approx((0.8, 0.3, 40))


def _backwards(table):
    table["run_wait_ns"][5] = 0


def _standing(table):
    table["time_ns"][5] = table["time_ns"][4]


def _short(table):
    table["time_ns"][2:] = 20 * S


def _absurd(table):
    for name in table.dtype.names[1:]:
        table[name][-1] = np.iinfo(table.dtype[name]).max


def _unknown(table):
    table["run_wait_ns"] = 0


@each_case("spoil", [_backwards, _standing, _short, _absurd, _unknown])
def test_nothing_is_known_where_counters_say_nothing_sensible(spoil):
    table = rows()
    spoil(table)
    found = use(table, rows())
    assert np.isnan(found.waiting[0]) and np.isnan(found.running[0])
    assert found.waiting[1] == pytest.approx(0.25)


@each_case(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-", set()), ("a-b", set()), ("0-999999999", set())],
)
def test_the_cpus_of_a_list(text, cpus):
    assert cpus_of(text) == cpus
