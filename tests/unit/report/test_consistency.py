"""No table of a report contradicts its headline: checked over runs of known truth."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re

import numpy as np
import pytest
from cases import chosen, each_case
from known_study import write_study
from rich.console import Console

pytest.importorskip("matplotlib")

from report_sample import print_report

from analysis import (
    bottleneck_timeline,
    jitter_amplification,
    model_size,
    nano_cluster,
    pacing_table,
    topology_hotspots,
)
from analysis.topology_hotspots import hotspot_figures
from experiments.synthetic_run import MS, Extra, SyntheticRun
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.text import format_count, format_duration, milliseconds, percent, place_name
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.figures.causes import jitter_figures
from hpcpace.diagnosis.measure import Selection, measure, panels_of
from hpcpace.diagnosis.summary import OriginRow, Summary
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.frames.run import load
from hpcpace.report.html import compressed
from hpcpace.report.run_report import page
from hpcpace.report.sections.causes import (
    named_ranks_of,
    origins_coverage,
    origins_remark,
    significant_gains,
    significant_origins,
)
from hpcpace.studies.setups import Setup, parse_layout
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase
from library.figures import study_figures
from library.files import ExaminedRun
from library.pacing import pacing_rows, read_paced_run

STAGES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.GC, None)
ALONE = (Phase.CHECKPOINT, Phase.EVAL)


def late(phase, rank, length_ns=15 * MS, **more):
    return Extra(rank=rank, length_ns=length_ns, phase=phase, spread=0.3, **more)


RUNS = {
    "no fault": {},
    "noise": {"noise": 0.15},
    **{
        f"{phase} of rank {rank}": {"extras": (late(phase, rank),)} for rank, phase in enumerate(STAGES * 2) if rank < 8
    },
    **{f"{phase} alone": {"extras": (late(phase, 0, 100 * MS, every=15),)} for phase in ALONE},
    "evaluation and a straggler": {"extras": (late(Phase.EVAL, 0, 400 * MS, every=15), late(Phase.DATA, 3))},
    "slow forward and backward": {"slow": {4: 1.3}},
    "slow node": {"slow": dict.fromkeys((2, 3), 1.3), "hosts": ("n0", "n1", "n2", "n3")},
    "stragglers of two stages": {"extras": (late(Phase.DATA, 1),), "slow": {6: 1.4}},
    "data of all": {"extras": tuple(late(Phase.DATA, rank, 25 * MS) for rank in range(8))},
    "data of half": {"extras": tuple(late(Phase.DATA, rank, 40 * MS) for rank in (0, 2, 4, 6))},
    "events": {"extras": (late(None, 5, 80 * MS, every=9),)},
    "alternating": {"pattern": (1.0, 0.3)},
    "alternating, with a straggler": {"pattern": (1.0, 0.3), "slow": {2: 1.5}},
    "wrong clock": {"slow": {1: 1.3}, "hosts": ("n0", "n1"), "clock_error_ns": dict.fromkeys((4, 5, 6, 7), 9 * MS)},
    "stages": {"pipeline": 2, "slow": {3: 1.3}},
    "heavy stage": {"pipeline": 2, "slow": dict.fromkeys((1, 3, 5, 7), 1.4)},
    "heavy stage, with a straggler": {"pipeline": 2, "slow": {1: 1.6, 3: 1.6, 5: 1.6, 7: 1.6, 2: 1.3}},
}


def report_of(folder, **truth) -> tuple[Summary, str]:
    run = SyntheticRun(**{"num_ranks": 8, "num_steps": 72, "noise": 0.02, **truth}).write(folder / "run")
    attempt = run.attempts()[0]
    summary = analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary
    stream = io.StringIO()
    print_report(Console(file=stream, width=100, color_system=None), summary)
    return summary, " ".join(stream.getvalue().split())


@each_case("name", chosen(RUNS, 9))
def test_no_table_contradicts_the_headline(name, tmp_path):
    summary, text = report_of(tmp_path, **RUNS[name])
    verdict, named = summary.verdict, named_ranks_of(summary)
    late_findings = [finding for finding in verdict.findings if finding.mode == "persistent straggler"]
    marked = {row.rank for row in summary.ranks if row.excess and row.excess.is_marked}

    # Excess: exactly those are marked whom the verdict names as late, and the line says nothing else.
    assert marked <= named
    blamed = {int(culprit.id) for finding in late_findings for culprit in finding.culprits if culprit.kind == "rank"}
    assert blamed <= marked
    assert ("no rank has more own work" in text) <= (not marked)
    assert all(f"{row.excess.share:.0%}" for row in summary.ranks if row.rank in marked)

    # Who is named in one finding is not named for the same in another.
    headlines = [verdict.headline, *verdict.also]
    assert len(headlines) == len(set(headlines))

    # Where waiting began: at a named rank, or the report says why not.
    causes = summary.causes
    if causes is not None and causes.origins and named and causes.origins[0].share_of_waits >= 0.1:
        assert causes.origins[0].rank in named or origins_remark(summary) in text

    # A place with more own work is one of those who are named.
    if late_findings and summary.hotspots and summary.hotspots[0].kind == "rank":
        assert int(summary.hotspots[0].id) in named

    # What would gain most is the work of a named rank, if it is that of a rank.
    gains = [gain.name for gain in significant_gains(summary) if gain.name.startswith("work of rank ")]
    if late_findings and gains:
        assert int(gains[0].removeprefix("work of rank ")) in named

    # The stage that is named is where the table of phases shows the largest difference.
    for finding in late_findings:
        for culprit, found in zip(finding.culprits, finding.stages, strict=False):
            if culprit.kind != "rank" or found is None or not found.stages:
                continue
            rows = {row.rank: row for row in summary.ranks}
            own = rows[int(culprit.id)]
            role = [row for row in summary.ranks if row.role == own.role and row.rank not in named]
            parts = [phase.phase for phase in found.phases]
            beyond = {p: own.parts_ns[p] - sum(row.parts_ns[p] for row in role) / len(role) for p in parts}
            assert found.phases[0].phase == max(beyond, key=beyond.__getitem__)


def everywhere_of(folder, truth) -> tuple[Summary, str, str, dict]:
    """Return the summary of a run, and its texts on a terminal, of its page and in summary.json."""
    run = SyntheticRun(**{"num_ranks": 8, "num_steps": 72, "noise": 0.02, **truth}).write(folder / "run")
    attempt = run.attempts()[0]
    analysis = analyze_traces(run, attempt, read_attempt(attempt), Selection())
    summary, stream = analysis.summary, io.StringIO()
    print_report(Console(file=stream, width=100, color_system=None), summary)
    content = page(summary, main_verdict(summary.verdict), analysis.plots)
    # Links to the glossary are inside of sentences, other elements between them.
    content = re.sub(r'<a class="term"[^>]*>([^<]*)</a>', r"\1", content)
    words = html.unescape(re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", content, flags=re.DOTALL))
    terminal, shown = (" ".join(text.split()) for text in (stream.getvalue(), words))
    return summary, terminal, shown, json.loads(json.dumps(summary.to_json()))


SHARED = (
    *("no fault", "noise", "0 of rank 0", "slow forward and backward", "slow node", "data of half", "events"),
    *("alternating, with a straggler", "wrong clock", "stages", "heavy stage, with a straggler"),
)
SCRIPTS = (jitter_amplification, topology_hotspots, bottleneck_timeline, pacing_table)


@each_case("name", chosen(SHARED, 6))
def test_shared_quantities_are_the_same_on_terminal_page_summary_and_in_scripts(name, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed(""))
    summary, terminal, shown, found = everywhere_of(tmp_path, RUNS[name])
    shares, speed, causes, jitter = summary.shares, summary.throughput, summary.causes, summary.jitter

    # One text for each, on the terminal and on the page; the number itself in summary.json.
    same = {f"{part.replace('_', ' ')} {percent(getattr(shares, part))}" for part in ("busy", "exposed_wait")}
    same |= {f"transfer {percent(shares.transfer)}", format_duration(speed.p50_ns), format_duration(speed.p95_ns)}
    same |= {f"{jitter.amplification:.3f}", f"{jitter.transient:.3f}", percent(jitter.loss_share)}
    same |= {origins_coverage(summary)} if significant_origins(summary, 1) else set()
    same |= {f"{100 * row.excess.share:+.1f}" for row in summary.ranks if row.excess}
    same |= {percent(gain.gain_share) for gain in significant_gains(summary)[:5]}
    same |= {format_duration(kind.mean_transfer_ns) for kind in summary.kinds}
    assert [text for text in same if text not in terminal or text not in shown] == []
    for sentence in (*summary.verdict.why, *summary.verdict.also):
        assert sentence in terminal and sentence[1:] in shown
    assert found["shares"]["transfer"] == shares.transfer and found["causes"]["traced_share"] == causes.traced_share
    assert [row["excess"]["share"] for row in found["ranks"]] == [row.excess.share for row in summary.ranks]

    # The scripts of analysis/ take theirs from the same functions; what they print is compared below.
    run = RunDirectory(tmp_path / "run")
    measured = measure(read_attempt(run.attempts()[0]).traces, Selection())
    panels = panels_of(measured)
    assert jitter_figures(measured, panels) == jitter
    assert hotspot_figures(measured, panels).spots == summary.hotspots

    # The curve beside the tiles begins at no loss and ends at theirs.
    if not jitter.is_node_unit:
        assert jitter.growth.amplification[0] == pytest.approx(1)
    assert jitter.growth.amplification[-1] == pytest.approx(jitter.amplification)


def printed_by(script, run, capsys, **examined) -> str:
    """Return what a script of analysis/ prints on one run."""
    if script is jitter_amplification:
        jitter = jitter_figures(examined["measured"], examined["panels"])
        script.print_table([("run", jitter)], [])
    elif script is topology_hotspots:
        figures = hotspot_figures(examined["measured"], examined["panels"])
        script.print_table([("run", figures, ())], script.rows_of("run", figures))
    elif script is bottleneck_timeline:
        script.print_table(script.find(ExaminedRun(name="run", run=load(run.path, warns=False))))
    else:
        script.print_table(pacing_rows([read_paced_run(load(run.path, warns=False))]), [])
    return " ".join(capsys.readouterr().out.split())


@each_case("name", chosen(SHARED, 4))
def test_scripts_print_what_the_report_prints(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed(""))
    summary, terminal, _, _ = everywhere_of(tmp_path, RUNS[name])
    run = RunDirectory(tmp_path / "run")
    measured = measure(read_attempt(run.attempts()[0]).traces, Selection())
    examined = {"measured": measured, "panels": panels_of(measured)}
    jitter, places, timeline, paced = (printed_by(script, run, capsys, **examined) for script in SCRIPTS)

    figures = re.search(
        r"(\S+ %) of the step time is lost to waiting for the slowest: "
        r"A (\S+) \[(\S+), (\S+)\] = persistent (\S+) \(noise alone (\S+)\) x transient (\S+)",
        terminal,
    )
    assert figures is not None
    loss, value, low, high, persistent, noise, transient = figures.groups()
    assert f"{value} {persistent} {transient} {loss}" in jitter
    assert f"{low}-{high}" in jitter and f"({noise})" in jitter

    for spot, (share, interval) in zip(summary.hotspots, hotspot_figures(**examined).excess, strict=True):
        adds, of_lateness = format_duration(spot.effect_ns), percent(spot.loss_share)
        place = place_name(spot.kind, spot.id)
        assert f"{place} {adds} {percent(share)} {of_lateness}" in places
        assert f"{percent(interval[0])} to {percent(interval[1])}" in places
        assert re.search(rf"{place} {adds} .*? {of_lateness}", terminal)

    # Steps with checkpoints or evaluations are in the means of a report; these runs have none.
    assert f"step p50 {format_duration(summary.throughput.p50_ns)}" in terminal
    assert f"the median {format_duration(summary.throughput.p50_ns)} of regular steps" in timeline
    shown = ("data", "forward", "backward", "optimizer")
    for row in summary.ranks:
        parts = " ".join(milliseconds(row.parts_ns[part]) for part in shown if f" {part} " in timeline)
        waits = [row.parts_ns[kind] + row.parts_ns[f"sync_{kind}"] for kind in ("wait", "transfer")]
        means = f"{milliseconds(row.step_ns)} {parts} {' '.join(map(milliseconds, waits))}"
        assert means in timeline and means in terminal

    speed = re.search(r"speed (\S+) tokens/s; .*? CV (\S+)", terminal)
    assert speed is not None
    assert re.search(rf"none 1 {re.escape(speed[1])} {speed[2]} ", paced)


def test_the_tables_of_a_study_print_what_the_reports_of_its_runs_print(tmp_path, capsys):
    setup = Setup(model="gpt2", preset="small", layout=parse_layout("2x1"), parallelism="pipeline", batch=16)
    study = write_study(tmp_path / "study", [setup], bytes_per_s=1_000_000)
    run = study.run_dir(study.runs()[0])
    summary = analyze_traces(run, run.attempts()[0], read_attempt(run.attempts()[0]), Selection()).summary
    stream = io.StringIO()
    print_report(Console(file=stream, width=100, color_system=None), summary)
    terminal = " ".join(stream.getvalue().split())
    rows, _ = study_figures(study)
    nano_cluster.print_tables(rows, {}, [])
    of_nano_cluster = capsys.readouterr().out
    model_size.print_table(model_size.sizes_of(rows), [])
    of_model_size = capsys.readouterr().out

    speed = format_count(summary.throughput.samples_per_s)
    assert f"speed {speed} tokens/s" in terminal and f" {speed} " in of_nano_cluster
    assert f"{1e6 / summary.throughput.samples_per_s:.4g}" in of_model_size
    (figures,) = rows[0].runs
    assert figures.step_ms * 1e6 == summary.throughput.p50_ns
    assert figures.communication_share == pytest.approx(summary.shares.exposed_wait + summary.shares.transfer)


@each_case("name", ["alternating, with a straggler", "slow forward and backward", "slow node", "stages"])
def test_the_excess_of_a_culprit_is_one_figure_everywhere(name, tmp_path):
    summary, text = report_of(tmp_path, **RUNS[name])
    run = RunDirectory(tmp_path / "run")
    measured = measure(read_attempt(run.attempts()[0]).traces, Selection())
    hotspots = hotspot_figures(measured, panels_of(measured))
    places = {(spot.kind, spot.id): found for spot, found in zip(hotspots.spots, hotspots.excess, strict=True)}
    rows = {row.rank: row for row in summary.ranks}
    culprits = summary.verdict.findings[0].culprits
    assert culprits
    for culprit in culprits:
        figure = percent(culprit.effect)
        assert f"own work {figure} above that of its role" in text
        if (culprit.kind, culprit.id) in places:
            assert places[culprit.kind, culprit.id] == (culprit.effect, culprit.interval)
        of_ranks = [rows[rank].excess.share for rank in sorted(named_ranks_of(summary))]
        assert percent(sum(of_ranks) / len(of_ranks)) == figure
        if culprit.kind == "rank":
            excess = rows[int(culprit.id)].excess
            assert (excess.share, excess.interval) == (culprit.effect, culprit.interval)
            assert f"{100 * excess.share:+.1f}%<" in text


@each_case(
    ("truth", "changed", "reason"),
    [
        ({}, {}, "it is last in some steps but not longer again and again, on average "),
        ({"pipeline": 2}, {}, "it has another role (pp1 tp0)"),
        ({}, {"propagated_share": 0.8}, "80.0 % of that reached the others through ranks that had waited for it"),
        (
            {"extras": (late(Phase.EVAL, 3, 100 * MS, every=20),)},
            {},
            "the others wait for its checkpoints and evaluations",
        ),
    ],
)
def test_a_rank_that_heads_the_list_of_waiting_and_is_not_named_is_explained(tmp_path, truth, changed, reason):
    found, _ = report_of(tmp_path, slow={2: 1.5}, **truth)
    verdict = dataclasses.replace(found.verdict, culprits=found.verdict.findings[0].culprits)
    origins = (OriginRow(**{"rank": 3, "share_of_waits": 0.6, "propagated_share": 0.0, "step_share": 0.1} | changed),)
    causes = dataclasses.replace(found.causes, origins=origins)
    remark = origins_remark(dataclasses.replace(found, verdict=verdict, causes=causes))
    assert remark.startswith("most waiting began at rank 3, although the verdict names rank 2: ") and reason in remark


def test_one_rank_hides_no_communication(tmp_path):
    summary, text = report_of(tmp_path, num_ranks=1, num_steps=4)
    assert summary.shares.overlap is None
    assert "hidden" not in text


def test_one_rank_is_compared_with_nobody(tmp_path):
    summary, text = report_of(tmp_path, num_ranks=1)
    assert summary.verdict.mode == "healthy"
    assert "a single rank waits for no other, and is compared with none" in text and "stages" not in text


@each_case("name", ["slow forward and backward", "slow node", "stages"])
def test_waiting_for_a_straggler_is_no_communication(name, tmp_path):
    run = SyntheticRun(**{"num_ranks": 8, "num_steps": 72, "noise": 0.02, **RUNS[name]}).write(tmp_path / "run")
    analysis = analyze_traces(run, run.attempts()[0], read_attempt(run.attempts()[0]), Selection())
    assert analysis.summary.shares.exposed_wait > analysis.summary.shares.transfer
    assert analysis.plots.communication_share.max() < 0.5


def test_the_matrix_of_the_page_is_the_one_that_the_script_draws(tmp_path):
    run = SyntheticRun(num_ranks=8, num_steps=72, noise=0.02, **RUNS["slow node"]).write(tmp_path / "run")
    traces = read_attempt(run.attempts()[0])
    drawn = analyze_traces(run, run.attempts()[0], traces, Selection()).plots.node_matrix
    measured = measure(traces.traces, Selection())
    ((unit, matrix),) = hotspot_figures(measured, panels_of(measured)).matrices
    assert (unit, drawn.labels) == ("node", matrix.labels)
    np.testing.assert_array_equal(drawn.ratio, matrix.relative)


@each_case("name", ["noise", "slow node", "stages", "evaluation and a straggler"])
def test_parts_add_up_to_their_whole(name, tmp_path):
    summary, _ = report_of(tmp_path, **RUNS[name])
    shares = summary.shares
    assert shares.busy + shares.exposed_wait + shares.transfer + shares.other == pytest.approx(1)
    for row in (*summary.ranks, *summary.roles):
        assert sum(row.parts_ns.values()) == pytest.approx(row.step_ns)
    of_parts = [
        sum(row.parts_ns[part] for row in summary.ranks for part in parts) / sum(row.step_ns for row in summary.ranks)
        for parts in (("wait", "sync_wait"), ("transfer", "sync_transfer"))
    ]
    assert of_parts == pytest.approx([shares.exposed_wait, shares.transfer])
    causes, jitter = summary.causes, summary.jitter
    assert causes.traced_share == pytest.approx(shares.exposed_wait, rel=0.01)
    assert sum(row.step_share for row in causes.origins) <= causes.traced_share * 1.0001
    assert sum(row.share_of_waits for row in causes.origins) <= 1.0001
    assert jitter.amplification == pytest.approx(jitter.persistent * jitter.transient)


@pytest.mark.parametrize("name", ["no fault", "alternating"])
def test_without_a_fault_nobody_is_named(name, tmp_path):
    summary, text = report_of(tmp_path, **RUNS[name])
    assert (summary.verdict.mode, named_ranks_of(summary)) == ("healthy", set())
    assert "no rank has more own work than the others of its role beyond noise" in text
