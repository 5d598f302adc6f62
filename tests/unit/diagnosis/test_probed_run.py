"""A run next to a probe of its hosts: all_reduces of 4 KiB that take 2 ms on four hosts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from probe_sample import made_law, made_probe
from report_sample import print_report
from rich.console import Console

from experiments.synthetic_run import SyntheticRun
from hpcpace.cli.report import command
from hpcpace.core.config import Config
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.records import ReadProbe
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import Summary
from hpcpace.probe.record import ProbeRecord
from hpcpace.report.run_report import page
from hpcpace.runs.measured import Conditions, from_summary
from hpcpace.trace.attempt_reader import read_attempt

HOSTS = ("n1", "n2", "n3", "n4")
BOUND = Config(DiagnosisConfig(communication_share=0.02))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return SyntheticRun(hosts=HOSTS, noise=0.001).write(tmp_path_factory.mktemp("probed") / "run")


def probe_of(time_ns: float, **values: object) -> ProbeRecord:
    """Return a probe in which an all_reduce of any size takes as long on n hosts as on n - 1 and 1 / 3 more."""
    laws = []
    for num_nodes in (2, 3, 4):
        law = made_law("all_reduce", num_nodes)
        piece = replace(law.pieces[0], latency_ns=time_ns * (num_nodes - 1) / 3, ns_per_byte=0.0)
        laws.append(replace(law, pieces=(piece,)))
    record: ProbeRecord = made_probe(**{"laws": tuple(laws), **values})
    return record


def summary_of(run: RunDirectory, record: ProbeRecord | None, config: Config = BOUND) -> Summary:
    attempt = run.last_attempt()
    probe = None if record is None else ReadProbe(source="probe.json", record=record)
    return analyze_traces(run, attempt, read_attempt(attempt), Selection(), config, probe=probe).summary


def test_what_the_probe_says_of_an_operation_can_be_compared(run: RunDirectory) -> None:
    content = summary_of(run, probe_of(0.92e6)).to_json()
    found = from_summary(content, run, Conditions()).probed
    assert found == pytest.approx({"all_reduce of 4.10 kB over 4 ranks on 4 hosts": 0.92e6})
    assert from_summary(summary_of(run, None).to_json(), run, Conditions()).probed == {}


def test_transfers_are_shown_next_to_what_they_take_in_the_probe(run: RunDirectory) -> None:
    probed = summary_of(run, probe_of(0.92e6)).probe
    assert probed is not None and probed.achieved == pytest.approx(0.46, abs=0.01)
    (row,) = probed.rows
    assert (row.op, row.num_nodes, row.num_ranks, row.size_bytes) == ("all_reduce", 4, 4, 4096)
    assert row.transfer_ns == pytest.approx(2e6, rel=0.01) and row.probed_ns == pytest.approx(0.92e6)


@pytest.mark.parametrize(
    ("time_ns", "why", "advice"),
    [
        (0.92e6, "transfers achieve 46.0 % of the probed rate: less than the link gives", "look for other traffic"),
        (1.9e6, "transfers achieve 95.0 % of the probed rate: the link's own rate", "use larger batches"),
    ],
)
def test_communication_bound_is_split_by_the_probe(run: RunDirectory, time_ns: float, why: str, advice: str) -> None:
    verdict = summary_of(run, probe_of(time_ns)).verdict
    assert verdict.mode == "communication-bound"
    assert verdict.why[-1].startswith(why)
    assert verdict.next[0].startswith(advice)


def test_a_healthy_run_below_the_probed_rate_says_so_in_a_remark(run: RunDirectory) -> None:
    verdict = summary_of(run, probe_of(0.92e6), Config()).verdict
    assert verdict.mode == "healthy"
    assert any(remark.startswith("transfers achieve 46.0 %") for remark in verdict.also)
    assert not any("probed" in remark for remark in summary_of(run, probe_of(1.9e6), Config()).verdict.also)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hosts": ("n1", "n2", "n3", "n9")}, "it has no n4, where this run was"),
        ({"laws": ()}, "it has no laws"),
    ],
)
def test_a_probe_that_says_nothing_of_the_run_is_refused_and_changes_nothing_else(
    run: RunDirectory, values: dict[str, object], reason: str
) -> None:
    record = probe_of(0.92e6, **values)
    summary, without = summary_of(run, record), summary_of(run, None)
    assert summary.probe is not None and summary.probe.refused.startswith(reason)
    assert summary.probe.rows == () and summary.probe.achieved is None
    assert replace(summary, probe=None) == without


def test_operations_that_were_not_probed_are_counted(run: RunDirectory) -> None:
    record = made_probe(laws=(made_law("broadcast", 4),))
    probed = summary_of(run, record).probe
    assert probed is not None and (probed.rows, probed.num_unprobed) == ((), 1)


def test_laws_over_hosts_extrapolate_the_transfer_with_the_waiting(tmp_path: Path) -> None:
    long = SyntheticRun(hosts=HOSTS, noise=0.001, num_steps=200).write(tmp_path / "run")
    summary, alone = summary_of(long, probe_of(1.9e6)), summary_of(long, None)
    assert summary.jitter is not None and alone.jitter is not None
    found, waiting = summary.jitter.predictions, alone.jitter.predictions
    assert (found.label, waiting.label) == ("waiting and transfer", "waiting only")
    step_ns = float(alone.throughput.mean_ns)
    more_ns = [
        (one.loss_share - other.loss_share) * step_ns for one, other in zip(found.points, waiting.points, strict=True)
    ]
    # 2 ms are latency of a ring for 1.9 of 3 hops, and 0.1 ms of volume on 4 hosts: 16 hosts have 15 hops.
    assert more_ns[0] == pytest.approx(0.0, abs=1.0)
    assert more_ns[2] == pytest.approx(1.9e6 / 3 * 12 + 0.1e6 * (15 / 16 - 3 / 4) / (3 / 4), rel=0.02)


def test_terminal_and_page_show_the_same_figures(run: RunDirectory) -> None:
    summary = summary_of(run, probe_of(0.92e6))
    text = io.StringIO()
    print_report(Console(file=text, width=80, highlight=False, markup=False, emoji=False), summary)
    shown = page(summary, summary.verdict, PlotData())
    for words in ("46.0 % of the probed rate", "4 KiB", "920 us", "2.00 ms"):
        assert words in text.getvalue() and words in shown


def test_the_probe_saved_with_a_run_is_used_and_a_named_one_wins(run: RunDirectory, tmp_path: Path) -> None:
    attempt = run.last_attempt()
    attempt.probe_json.write_text(json.dumps(probe_of(1.0e6).to_json()))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(probe_of(0.6e6).to_json()))
    try:
        found = [
            json.loads(CliRunner().invoke(command, [str(run.path), "--json", *more]).stdout)["probe"]
            for more in ([], ["--probe", str(other)])
        ]
    finally:
        attempt.probe_json.unlink()
    assert [round(one["achieved"], 1) for one in found] == [0.5, 0.3]
    assert [one["source"] for one in found] == ["probe.json", str(other)]


def test_a_damaged_probe_in_a_run_is_left_out_with_its_reason(run: RunDirectory) -> None:
    attempt = run.last_attempt()
    attempt.probe_json.write_text('{"schema": "hpcpace-probe/1"')
    try:
        summary = summary_of(run, None)
    finally:
        attempt.probe_json.unlink()
    assert summary.probe is None
    assert any("probe.json is left out" in problem for problem in summary.cut_off.problems)


def test_a_file_that_is_no_probe_ends_the_report(run: RunDirectory, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text("[]")
    result = CliRunner().invoke(command, [str(run.path), "--probe", str(path)])
    assert result.exit_code != 0 and "no saved probe" in str(result.exception)
