"""Histories of runs whose truth is known, the index, and what other tools measured."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each_case
from sample_runs import sample_run

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.codec import convert, plain
from hpcpace.core.config import Config
from hpcpace.core.errors import UsageError
from hpcpace.core.rundir import HISTORY_INDEX, json_text
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.report.sections.history import counts_sentence, event_sentence, headline
from hpcpace.runs.history import Event, History, history, rows_of_csv
from hpcpace.runs.history_row import HistoryRow, IndexedRuns, indexed_runs, row_of, sealed
from hpcpace.runs.measured import Conditions

DATA = Path(__file__).parents[2] / "data" / "history"
DAY_NS = 86_400 * 10**9
BEGIN_NS = 20_000 * DAY_NS
RUN = SyntheticRun(num_ranks=2, num_steps=12, num_warmup=2, hosts=("n0", "n1"))


def _row(
    number: int, *, job: str = "train", step: float = 0.1, long: float = 0.01, slow: dict[str, float] | None = None
) -> HistoryRow:
    random = np.random.default_rng(number)
    hosts = ("n0", "n1", "n2", "n3")
    slowness = {host: float(random.normal(0.0, 0.005)) + (slow or {}).get(host, 0.0) for host in hosts}
    p50_ns = step * 1e9 * float(np.exp(random.normal(0.0, 0.005)))
    return HistoryRow(
        run=f"run-{number}",
        begun_unix_ns=BEGIN_NS + number * DAY_NS,
        job=job,
        kind="4 ranks",
        p50_ns=p50_ns,
        mean_ns=p50_ns * (1 + long * float(random.gamma(4.0, 0.25))),
        hosts=hosts,
        slowness=slowness,
    )


def _history(rows: list[HistoryRow], **options: str) -> History:
    runs = IndexedRuns(rows=tuple(rows), broken={}, num_running=0, num_read=0, index="")
    return history("runs", runs, **options)


def test_a_host_that_got_slow_is_found_with_date_and_jobs() -> None:
    rows = [_row(n, job=f"job{n % 3}", slow={"n3": 0.077} if n >= 20 else {}) for n in range(40)]
    (event,) = _history(rows).events
    assert (event.kind, event.name, event.duration, event.run) == ("host", "n3", "lasting", "run-20")
    assert event.begun_unix_ns == BEGIN_NS + 20 * DAY_NS and event.share == pytest.approx(0.08, abs=0.01)
    assert event.jobs == ("job0", "job1", "job2")
    assert "n3 is " in event_sentence(event) and "in all 3 jobs that used it" in event_sentence(event)


def test_a_host_that_was_always_slow_is_chronic() -> None:
    found = _history([_row(n, slow={"n3": 0.06}) for n in range(10)])
    (event,) = found.events
    assert (event.name, event.duration, event.num_runs) == ("n3", "chronic", 10)
    assert headline(found) == "1 chronically slow host" and "in all its 10 runs" in event_sentence(event)


def test_a_chronic_host_is_not_said_to_be_slow_in_runs_in_which_it_was_not() -> None:
    events = _history([_row(n, slow={"n3": 0.1} if n % 6 != 3 else {}) for n in range(24)]).events
    (event,) = [event for event in events if event.duration == "chronic"]
    assert (event.num_runs, event.num_before) == (20, 4) and "in 20 of its 24 runs" in event_sentence(event)


def test_a_host_that_was_slow_in_half_of_its_runs_is_not_chronic() -> None:
    events = _history([_row(n, slow={"n3": 0.1} if n % 4 < 2 else {}) for n in range(12)]).events
    assert "chronic" not in {event.duration for event in events}


def test_a_host_that_was_slow_once_is_a_one_off() -> None:
    (event,) = _history([_row(n, slow={"n3": 0.2} if n == 15 else {}) for n in range(30)]).events
    assert (event.name, event.duration, event.run) == ("n3", "one-off", "run-15")


def test_a_host_that_got_rank_0_may_have_more_to_do() -> None:
    rows = [
        replace(_row(n, slow={"n1": 0.06} if n < 20 else {"n2": 0.06}), first_host="n1" if n < 20 else "n2")
        for n in range(40)
    ]
    said = {event.name: (event.rank_0, event_sentence(event)) for event in _history(rows).events}
    assert said["n1"][0] == "lost" and "it had rank 0 before" in said["n1"][1]
    assert said["n2"][0] == "gained" and "it has rank 0 since then" in said["n2"][1]
    (chronic,) = _history(rows[:20]).events
    assert chronic.rank_0 == "always" and "it always has rank 0" in event_sentence(chronic)
    (other,) = _history([replace(row, first_host="n0") for row in rows[:20]]).events
    assert other.rank_0 == "" and "rank 0" not in event_sentence(other)


def test_a_job_that_got_slow_accuses_no_host_and_no_other_job() -> None:
    rows = [_row(n, job=f"job{n % 2}", step=0.12 if n >= 20 and n % 2 else 0.1) for n in range(40)]
    (event,) = _history(rows).events
    assert (event.kind, event.name, event.duration) == ("job", "job1", "lasting")
    assert event.share == pytest.approx(0.2, abs=0.02) and event.run == "run-21"


def test_long_steps_that_came_to_stay_are_told_though_the_median_is_as_before() -> None:
    (event,) = _history([_row(n, long=0.1 if n >= 20 else 0.01) for n in range(40)]).events
    assert (event.kind, event.name, event.duration, event.run) == ("long steps", "train", "lasting", "run-20")
    assert event.share == pytest.approx(0.09, abs=0.03)
    assert event_sentence(event).startswith("long steps of train cost ") and "mean over median" in event_sentence(event)


def test_a_median_that_jumped_alone_is_told_with_the_mean() -> None:
    rows = [_row(n) for n in range(40)]
    # Steps are of two kinds: of the later runs, slightly more than half are long ones.
    rows = [replace(row, p50_ns=row.p50_ns * (1.6 if n >= 20 else 1), mean_ns=1.3e8) for n, row in enumerate(rows)]
    jumped, fewer = sorted(_history(rows).events, key=lambda event: event.kind)
    assert (jumped.kind, fewer.kind) == ("job", "long steps")
    assert jumped.share == pytest.approx(0.6, abs=0.02) and jumped.mean_share == pytest.approx(0.0, abs=0.01)
    assert "its mean step, which throughput follows, changed by +0.0 %" in event_sentence(jumped)
    assert "mean step" not in event_sentence(
        _history([_row(n, step=0.1 + 0.01 * (n > 20)) for n in range(40)]).events[0]
    )


def test_a_job_that_gets_slower_gradually_has_a_drift_and_no_date_of_a_change() -> None:
    found = _history([_row(n, step=0.1 * (1 + 0.15 * n / 59)) for n in range(60)])
    (event,) = found.events
    assert (event.kind, event.duration, event.run, event.num_runs) == ("job", "drift", "run-0", 60)
    assert event.share == pytest.approx(0.15, abs=0.01) and event.last_unix_ns == BEGIN_NS + 59 * DAY_NS
    said = event_sentence(event)
    assert headline(found) == "1 drift" and " % slower gradually, from " in said and "over 60 runs" in said
    assert event.mean_share is None


def test_a_host_that_gets_slower_gradually_has_a_drift_and_is_not_chronic() -> None:
    (event,) = _history([_row(n, job=f"job{n % 2}", slow={"n3": 0.15 * n / 59}) for n in range(60)]).events
    assert (event.kind, event.name, event.duration) == ("host", "n3", "drift")
    assert "in all 2 jobs that used it" in event_sentence(event)


def test_few_runs_of_many_healthy_hosts_have_hardly_an_event() -> None:
    lasting = anything = 0
    for seed in range(20):
        slow = np.random.default_rng(seed).normal(0.0, 0.02, (8, 16))
        rows = [
            replace(_row(n), slowness={f"n{host}": float(value) for host, value in enumerate(values)})
            for n, values in enumerate(slow)
        ]
        events = _history(rows).events
        lasting += any(event.duration == "lasting" for event in events)
        anything += bool(events)
    assert lasting <= 1 and anything <= 3


def test_a_mean_that_is_the_median_changes_as_it_does() -> None:
    # The level between is too near to the first one to be told, and the last change starts from it.
    steps = np.repeat([0.1, 0.1015, 0.1075], 15)
    rows = [replace(_row(n), p50_ns=step * 1e9, mean_ns=step * 1e9) for n, step in enumerate(steps)]
    events = _history(rows).events
    assert events and all(event.mean_share == pytest.approx(event.share) for event in events)


def test_a_run_that_has_more_long_steps_by_chance_is_none_of_it() -> None:
    assert _history([_row(n, long=0.2 if n % 13 == 5 else 0.01) for n in range(40)]).events == ()


def test_short_and_long_runs_with_the_same_share_of_long_steps_are_alike() -> None:
    events: list[Event] = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        num_steps = np.where(np.arange(30) < 15, 50, 2000)
        shares = random.binomial(num_steps, 0.01) * 5 / num_steps
        rows = [replace(_row(number), p50_ns=1e8, mean_ns=1e8 * (1 + share)) for number, share in enumerate(shares)]
        events += _history(rows).events
    assert len(events) <= 1


def test_other_layouts_are_other_series() -> None:
    rows = [replace(_row(n, step=0.1 + 0.1 * (n % 2)), kind=f"{4 + 4 * (n % 2)} ranks") for n in range(40)]
    found = _history(rows)
    assert {one.name for one in found.series} == {"train (4 ranks)", "train (8 ranks)"} and found.events == ()


def test_other_work_is_another_series_that_says_what_differs() -> None:
    works = [
        {"data.seq_len": "1024", "model.num_layers": "12" if n < 10 else "24", "model.width": "64"} for n in range(20)
    ]
    rows = [replace(_row(n, step=0.1 if n < 10 else 0.19), work=work) for n, work in enumerate(works)]
    found = _history(rows)
    assert found.events == ()
    names = {"train (4 ranks, model.num_layers 12)", "train (4 ranks, model.num_layers 24)"}
    assert {one.name for one in found.series} == names


def test_work_that_only_later_runs_record_is_no_other_work() -> None:
    rows = [
        replace(_row(n, step=0.12 if n >= 20 else 0.1), work={"model.width": "64"} if n >= 15 else {})
        for n in range(40)
    ]
    found = _history(rows)
    assert [one.name for one in found.series] == ["train"] and [event.run for event in found.events] == ["run-20"]


def test_each_series_of_a_job_has_its_own_name() -> None:
    works = [{"a": str(n // 4), "b": str(n // 2 % 2), "c": str(n % 2), "d": str(n), "same": "1"} for n in range(8)]
    names = [one.name for one in _history([replace(_row(n), work=work) for n, work in enumerate(works)]).series]
    assert len(set(names)) == 8 and "train (4 ranks, a 0, b 0, c 1)" in names


def test_batches_that_differ_slightly_are_one_series() -> None:
    rows = [
        replace(_row(n, step=0.12 if n >= 6 else 0.1), samples_per_step=40000.0 + 4 * n, samples_unit="tokens")
        for n in range(12)
    ]
    found = _history(rows)
    assert [(one.name, one.kind) for one in found.series] == [("train", "4 ranks, 40020 tokens")]
    assert [(event.kind, event.run, event.duration) for event in found.events] == [("job", "run-6", "lasting")]


def test_a_host_that_gets_a_domain_is_the_same_host() -> None:
    rows = [_row(n, slow={"n3": 0.077} if n >= 10 else {}) for n in range(40)]
    domain = ".cluster.local"
    rows = [
        row
        if n < 20
        else replace(
            row,
            hosts=tuple(f"{host}{domain}" for host in row.hosts),
            slowness={f"{host}{domain}": value for host, value in row.slowness.items()},
            first_host=f"n0{domain}",
        )
        for n, row in enumerate(rows)
    ]
    found = _history(rows)
    (event,) = found.events
    assert (event.name, event.run, event.num_runs, found.num_hosts) == ("n3", "run-10", 30, 4)
    assert found.newest_first()[0][0].first_host == "n0"
    for host in ("n3", f"n3{domain}"):
        assert [one.name for one in _history(rows, host=host).events] == ["n3"]


def test_runs_of_unknown_date_do_not_come_first_among_those_of_a_host() -> None:
    dated = [_row(n, slow={"n3": 0.077} if n >= 20 else {}) for n in range(40)]
    undated = [replace(_row(n, job="other", slow={"n3": 0.2}), begun_unix_ns=0) for n in range(10)]
    assert [(event.name, event.run) for event in _history([*undated, *dated]).events] == [("n3", "run-20")]
    assert [event.duration for event in _history(undated).events] == ["chronic"]


def test_hosts_of_two_domains_stay_two() -> None:
    rows = [replace(_row(n), hosts=(f"n1.{'ab'[n % 2]}",), slowness={f"n1.{'ab'[n % 2]}": 0.0}) for n in range(8)]
    assert _history(rows).num_hosts == 2


def test_one_job_or_host_can_be_looked_at() -> None:
    rows = [_row(n, job=f"job{n % 2}", slow={"n3": 0.077} if n >= 20 else {}) for n in range(40)]
    assert {row.job for one in _history(rows, job="job1").series for row in one.rows} == {"job1"}
    assert [event.name for event in _history(rows, host="n3").events] == ["n3"]
    assert _history(rows, host="n2").events == () and _history(rows, host="n9").num_runs == 0


def test_quiet_runs_have_no_events() -> None:
    assert _history([_row(n) for n in range(60)]).events == ()


def test_a_line_is_made_of_a_run() -> None:
    work = {"model.num_layers": "12", "model.name": "gpt", "data.source": "/data/a"}
    conditions = Conditions(job_name="gpt", begun_unix_ns=BEGIN_NS, dtype="bfloat16", work=work)
    row = row_of(sample_run("runs/a", work=(100.0, 100.0, 100.0, 110.0), conditions=conditions), "a", BEGIN_NS)
    assert (row.run, row.job, row.begun_unix_ns) == ("a", "gpt", BEGIN_NS)
    assert row.kind == "4 ranks, dp=4, bfloat16" and (row.samples_per_step, row.samples_unit) == (64.0, "tokens")
    assert row.work == {"model.num_layers": "12", "emulation": "none"} and row.identity
    assert row.slowness == pytest.approx({"n0": 0, "n1": 0, "n2": 0, "n3": 0.0953}, abs=1e-4)
    assert row.first_host == "n0"
    assert convert(json.loads(json.dumps(plain(row))), HistoryRow) == row


def test_two_ranks_do_not_say_which_of_them_is_slow() -> None:
    assert row_of(sample_run(work=(100.0, 120.0), hosts=("n0", "n1")), "a", 5).slowness == {}


@pytest.mark.parametrize(("size", "least", "most"), [(0.05, 14, 20), (0.0, 0, 1)])
def test_a_host_of_few_runs_is_judged_by_the_spread_of_all_hosts(size: float, least: int, most: int) -> None:
    num_told = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        rows = [
            replace(
                _row(number),
                slowness={
                    f"n{host}": random.normal(size if host == 3 and number >= 4 else 0.0, 0.01) for host in range(16)
                },
            )
            for number in range(8)
        ]
        events = [event for event in _history(rows).events if event.kind == "host" and event.duration == "lasting"]
        assert {event.name for event in events} <= ({"n3"} if size else {event.name for event in events})
        num_told += bool(events)
    assert least <= num_told <= most


def _host_events_of(late: tuple[int, ...]) -> dict[str, float]:
    """Return what is told of hosts with a rank each, some of which do 10 % more from the seventh run on."""
    rows = []
    for number in range(12):
        slow = late if number >= 6 else ()
        work = [110.0 if rank in slow else 100.0 for rank in range(4)]
        run = sample_run(work=work, hosts=tuple(f"n{rank}" for rank in range(4)))
        rows.append(row_of(run, f"r{number:02d}", (number + 1) * DAY_NS))
    return {one.name: round(one.share, 3) for one in _history(rows).events if one.kind == "host"}


def test_hosts_that_do_as_before_are_not_faster_because_others_got_slower() -> None:
    assert _host_events_of((2,)) == {"n2": 0.1}
    assert _host_events_of((2, 3)) == {"n2": 0.1, "n3": 0.1}
    assert _host_events_of((1, 2, 3)) == {}


def _events_of(name: str) -> dict[str, list[Event]]:
    found = _history(rows_of_csv(DATA / name))
    return {one.job: list(one.events) for one in found.series}


def test_published_iteration_times_of_megatron_lm_have_their_changes_marked() -> None:
    found = _events_of("megatron-lm.csv")
    off, now = found["gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer"]
    assert (off.duration, off.run.split()[0], round(off.share, 2)) == ("one-off", "4736aedb65", 0.44)
    # Two runs only, but they agree, and are eleven weeks apart.
    assert (now.duration, now.run.split()[0], now.num_runs) == ("lasting", "5fe3f06658", 2)
    assert (round(now.before, 3), round(now.after, 3)) == (0.528, 0.823)
    assert "since" in event_sentence(now) and "in 2 runs 79 days apart" in event_sentence(now)
    assert found["bert_mcore_tp1_pp2"] == []


def test_a_throughput_is_not_compared_with_a_step_time(tmp_path: Path) -> None:
    lines = [f"r{n},{'' if n % 2 else 0.5},{'' if n % 2 == 0 else 128}\n" for n in range(20)]
    (tmp_path / "runs.csv").write_text(f"run,step_time_s,throughput\n{''.join(lines)}")
    found = _history(rows_of_csv(tmp_path / "runs.csv"))
    assert [one.name for one in found.series] == ["all", "all (time of a sample)"] and found.events == ()


def test_runs_without_a_date_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [f"r{n},{0.5 if n < 10 else 0.6}\n" for n in range(20)]
    (tmp_path / "runs.csv").write_text(f"run,step_time_s\n{''.join(lines)}")
    found = _history(rows_of_csv(tmp_path / "runs.csv"))
    assert [row.run.split()[0] for row, _ in found.newest_first()] == [f"r{n}" for n in reversed(range(20))]
    assert "all is 20.0 % slower since run r10 (line 12)" in event_sentence(found.events[0])


def test_runs_of_which_only_some_have_a_date_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("run,job,date,step_time_s\na,x,,1\nb,y,2026-05-07,1\n")
    assert len(rows_of_csv(tmp_path / "runs.csv")) == 2
    (tmp_path / "runs.csv").write_text("run,job,date,step_time_s\na,x,,1\nb,x,2026-05-07,1\n")
    with pytest.raises(UsageError, match=r"a \(line 2\) has no date, and others of job 'x' have one"):
        rows_of_csv(tmp_path / "runs.csv")


@each_case(
    ("days", "off", "duration"),
    [
        pytest.param((20, 26), (0.2, 0.2), "recent", id="two runs of one week may be one incident"),
        pytest.param((20, 27), (0.2, 0.2), "lasting", id="two runs a week apart that agree"),
        pytest.param((20, 27), (0.2, 0.3), "recent", id="two runs a week apart that differ"),
        pytest.param((27,), (0.2,), "recent", id="one run"),
    ],
)
def test_two_runs_that_agree_a_week_apart_are_lasting(
    days: tuple[int, ...], off: tuple[float, ...], duration: str
) -> None:
    rows = [_row(n) for n in range(20)]
    late = zip(days, off, strict=True)
    rows += [replace(_row(day, step=0.1 * (1 + more)), begun_unix_ns=BEGIN_NS + day * DAY_NS) for day, more in late]
    (event,) = _history(rows).events
    assert (event.duration, event.num_runs) == (duration, len(days))
    undated = [replace(row, begun_unix_ns=0) for row in rows]
    assert [event.duration for event in _history(undated).events] == ["recent"]


@pytest.mark.parametrize("num_off", [2, 3])
def test_runs_at_the_end_that_are_as_runs_were_for_once_before_are_recent(num_off: int) -> None:
    rows = [_row(n, step=0.12 if n in (5, 9, 13) or n >= 20 else 0.1) for n in range(20 + num_off)]
    rows = [replace(row, begun_unix_ns=BEGIN_NS + 7 * number * DAY_NS) for number, row in enumerate(rows)]
    (event,) = [event for event in _history(rows).events if event.duration != "one-off"]
    assert (event.duration, event.num_runs) == ("recent", num_off)
    assert f"in {num_off} runs so far: more are needed" in event_sentence(event)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was reported, so that reading it takes no time."""
    run = RUN.write(tmp_path_factory.mktemp("reported") / "run")
    made = analyze(run, run.attempt(0), Selection(), Config(), begin_stage=lambda _: lambda done, total: None)
    assert made is not None
    run.write(run.summary_json.name, json_text(made.summary.to_json()))
    return run.path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, reported: Path) -> Path:
    """Two runs, one that is broken, one without steps, and one that still records."""
    folder = tmp_path_factory.mktemp("written")
    shutil.copytree(reported, folder / "a")
    shutil.copytree(reported, folder / "topic" / "b")
    for file in RUN.write(folder / "broken").last_attempt().trace_dir.iterdir():
        file.write_bytes(b"no trace")
    replace(RUN, num_warmup=12).write(folder / "warmup")
    replace(RUN, lost_steps={1: 2}).write(folder / "running")
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these runs."""
    # Whether a journal is fresh depends on how busy the machine is; only the last of these runs has one.
    monkeypatch.setattr("hpcpace.runs.load.is_running", lambda *_: True)
    return Path(shutil.copytree(written, tmp_path, dirs_exist_ok=True))


def test_broken_and_running_runs_are_counted(folder: Path) -> None:
    found = indexed_runs(folder)
    assert sorted(row.run for row in found.rows) == ["a", "topic/b"]
    assert sorted(found.broken) == ["broken", "warmup"] and all(found.broken.values())
    assert (found.num_running, found.num_read, found.index) == (1, 5, "updated")


def _begins(run: Path, content: str) -> None:
    (run / "attempt-0" / "run.json").write_text(content)


def _of(folder: Path, begun_ns: int) -> None:
    for file in (folder / "attempt-0" / "trace").iterdir():
        os.utime(file, ns=(begun_ns, begun_ns))


def test_a_run_that_does_not_say_when_it_began_has_the_date_of_its_traces(folder: Path) -> None:
    _of(folder / "a", BEGIN_NS)
    _of(folder / "topic" / "b", BEGIN_NS + DAY_NS)
    os.utime(folder / "a", ns=(BEGIN_NS + 9 * DAY_NS,) * 2)  # as by a report
    first = indexed_runs(folder)
    assert [(row.run, row.begun_unix_ns) for row in first.rows] == [("a", BEGIN_NS), ("topic/b", BEGIN_NS + DAY_NS)]
    assert "the date of its oldest trace file" in first.problems["a"]
    file = folder / "a" / "attempt-0" / "trace" / "rank-00000.h5"
    with h5py.File(file, "r+") as trace:
        trace.attrs["created_unix_ns"] = BEGIN_NS - DAY_NS
    (folder / HISTORY_INDEX).unlink()
    again = indexed_runs(folder)
    assert again.rows[0].begun_unix_ns == BEGIN_NS - DAY_NS and "a" not in again.problems


def test_a_record_that_cannot_be_read_is_told(folder: Path) -> None:
    _begins(folder / "a", "{")
    for _ in range(2):
        found = indexed_runs(folder)
        assert "run.json is left out" in found.problems["a"] and len(found.rows) == 2
    _begins(folder / "a", json.dumps({"created_unix_ns": BEGIN_NS}))
    found = indexed_runs(folder)
    assert "a" not in found.problems and found.rows[0].begun_unix_ns == BEGIN_NS


def test_a_run_without_any_date_has_no_place_among_those_with_one(folder: Path) -> None:
    shutil.rmtree(folder / "a" / "attempt-0" / "trace")
    found = indexed_runs(folder)
    assert [row.run for row in found.rows] == ["topic/b"] and "it has no place" in found.broken["a"]
    shutil.rmtree(folder / "topic" / "b" / "attempt-0" / "trace")
    found = indexed_runs(folder)
    assert len(found.rows) == 2 and found.problems["a"] == "when it began is not known"


def test_a_copy_of_a_run_counts_once(folder: Path) -> None:
    _begins(folder / "a", json.dumps({"name": "x", "created_unix_ns": BEGIN_NS}))
    _begins(folder / "topic" / "b", json.dumps({"name": "x", "created_unix_ns": BEGIN_NS + 1}))
    shutil.copytree(folder / "a", folder / "0-backup" / "a")
    runs = indexed_runs(folder)
    assert [row.run for row in runs.rows] == ["a", "topic/b"] and runs.copies == {"0-backup/a": "a"}
    assert "1 left out as copies" in counts_sentence(history("runs", runs))


def test_the_index_saves_reading_runs_that_have_not_changed(folder: Path) -> None:
    first = indexed_runs(folder)
    again = indexed_runs(folder)
    assert again.rows == first.rows and again.broken == first.broken
    assert (again.num_read, again.index) == (1, "kept")  # the run that still records
    shutil.copytree(folder / "a", folder / "c")
    assert indexed_runs(folder).num_read == 2


def test_broken_runs_are_tried_again_when_something_may_have_healed_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed_runs(folder)
    more_memory = Config(ReportConfig(memory="1GiB"))
    assert [indexed_runs(folder, more_memory).num_read for _ in range(2)] == [3, 1]  # with the run that still records
    monkeypatch.setattr("hpcpace.runs.history_row.__version__", "999")
    assert indexed_runs(folder, more_memory).num_read == 3
    (folder / "broken" / "attempt-0").chmod(0o700)
    assert indexed_runs(folder, more_memory).num_read == 2


def test_a_run_that_changed_or_was_removed_is_not_taken_from_the_index(folder: Path) -> None:
    indexed_runs(folder)
    RUN.write(folder / "a")  # another attempt
    (folder / "topic" / "b").rename(folder / "gone-hidden")
    (folder / "gone-hidden").rename(folder / ".hidden")
    found = indexed_runs(folder)
    assert (found.num_read, [row.run for row in found.rows]) == (2, ["a"])
    assert set(json.loads((folder / HISTORY_INDEX).read_text())["runs"]) == {"a", "broken", "warmup"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(schema="hpcpace-history-index/9"),
        lambda content: content.pop("runs"),
        lambda content: content["runs"]["a"].pop("stamp"),
        lambda content: content["runs"]["a"]["row"].update(p50_ns=-1),
        lambda content: content["runs"]["a"]["row"].update(slowness={"n0": "slow"}),
        lambda content: content["runs"].update(a=3),
    ],
)
def test_a_damaged_index_is_made_anew(folder: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    first = indexed_runs(folder)
    content = json.loads((folder / HISTORY_INDEX).read_text())
    damage(content)
    (folder / HISTORY_INDEX).write_text(json.dumps(content))
    again = indexed_runs(folder)
    assert (again.rows, again.index) == (first.rows, "updated")


def _plant(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the rows of an index as somebody can who knows how one is written."""
    content = json.loads((folder / HISTORY_INDEX).read_text())
    for entry in content["runs"].values():
        if entry["row"]:
            change(entry["row"])
    (folder / HISTORY_INDEX).write_bytes(sealed(content["runs"]))


@pytest.mark.parametrize("way", ["give_away", 0o664, 0o646])
def test_an_index_that_somebody_else_can_have_written_is_not_believed(
    folder: Path, way: str | int, request: pytest.FixtureRequest
) -> None:
    first = indexed_runs(folder)
    _plant(folder, lambda row: row.update(p50_ns=1.0, mode="healthy"))
    if isinstance(way, int):
        (folder / HISTORY_INDEX).chmod(way)
    else:
        request.getfixturevalue(way)(folder / HISTORY_INDEX)
    again = indexed_runs(folder)
    assert (again.rows, again.num_read) == (first.rows, 5)
    assert again.index.startswith("updated (all runs were read: the index before ")
    assert indexed_runs(folder).num_read == 1


def test_the_index_is_one_that_is_used_again_under_any_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        indexed_runs(folder)
    finally:
        os.umask(before)
    assert indexed_runs(folder).num_read == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.update(run="somewhere/else"),
        lambda row: row.update(p50_ns=10**400),
        lambda row: row.update(p50_ns=float("nan"), mean_ns=True),
        lambda row: row.update(begun_unix_ns=10**400),
        lambda row: row.update(samples_per_s="fast"),
        lambda row: row.update(slowness={"n0": 10**400}),
        lambda row: row.update(hosts="n0"),
        lambda row: row.update(hosts={"n0": 1}),
        lambda row: row.update(work=[]),
        lambda row: row.clear(),
    ],
)
def test_entries_that_contradict_their_run_are_read_again(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    first = indexed_runs(folder)
    _plant(folder, change)
    again = indexed_runs(folder)
    assert (again.rows, again.num_read) == (first.rows, 5)


def test_an_index_that_was_changed_since_it_was_written_is_made_anew(folder: Path) -> None:
    first = indexed_runs(folder)
    text = (folder / HISTORY_INDEX).read_text()
    (folder / HISTORY_INDEX).write_text(text.replace('"mean_ns":', '"mean_ns":9'))
    assert indexed_runs(folder).rows == first.rows


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"runs":' * 100_000),
        lambda path: path.write_text('{"runs":' + "9" * 100_000),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    ],
    ids=["deep list", "deep object", "number", "pipe", "device", "large"],
)
def test_whatever_has_the_place_of_the_index_is_replaced(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / HISTORY_INDEX)
    begin = time.process_time()
    assert indexed_runs(folder).index == "updated"
    assert time.process_time() - begin < 5
    assert indexed_runs(folder).num_read == 1


def test_a_folder_with_the_name_of_the_index_is_left_alone(folder: Path) -> None:
    (folder / HISTORY_INDEX).mkdir()
    assert indexed_runs(folder).index.startswith("cannot be written")


@pytest.mark.parametrize("name", ["attempt-\N{SUPERSCRIPT TWO}", f"attempt-{'9' * 200}", "attempt-"])
def test_a_folder_that_is_nearly_an_attempt_is_none(folder: Path, name: str) -> None:
    (folder / "a" / name).mkdir()
    assert "a" in {row.run for row in indexed_runs(folder).rows}


def test_an_index_that_is_no_json_or_a_link_is_made_anew(folder: Path, tmp_path: Path) -> None:
    (folder / HISTORY_INDEX).write_bytes(b"\xff{")
    assert indexed_runs(folder).index == "updated"
    (folder / HISTORY_INDEX).unlink()
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / HISTORY_INDEX).symlink_to(tmp_path / "elsewhere.json")
    assert indexed_runs(folder).index == "updated"
    assert (tmp_path / "elsewhere.json").read_text() == "{}"


def test_a_folder_that_cannot_be_written_has_no_index_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr("hpcpace.core.files.Folder.write", refuse)
    found = indexed_runs(folder)
    assert found.index.startswith("cannot be written (Read-only file system)") and len(found.rows) == 2
