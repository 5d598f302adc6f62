from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from report_sample import HEALTHY, NASTY, SampleCulprit, SampleVerdict, sample_plots, sample_summary

from hpcpace.core.rundir import json_text
from hpcpace.diagnosis.plot_data import HostClock, Matrix, PlotData
from hpcpace.diagnosis.summary import AttemptRow, Growth, Jitter, Prediction, Predictions, RankCores, SensitivityRow
from hpcpace.report.document import GLOSSARY, Document, Row, Section, Table, terms_in
from hpcpace.report.drawing import binned, bins, packed, plot_text, unique
from hpcpace.report.html import compressed, html_page, plot_library
from hpcpace.report.run_report import page, write_html
from hpcpace.report.sections.causes import growth
from hpcpace.report.sections.hosts import clock_error, transfer_matrix
from hpcpace.report.sections.phases import MAX_BARS, phase_shares
from hpcpace.report.sections.steps import own_delay, slow_step, step_distribution, step_times

VERDICT = SampleVerdict()
LIBRARY = "window.Plotly = {};"
OF_SUMMARY = {"origins", "gains", "hotspots", "phase-shares", "wait-transfer"}
"""The plots that need nothing but the summary."""


@pytest.fixture(autouse=True)
def small_library(monkeypatch):
    # The library is 5 MB, which every page here would be parsed for.
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed(LIBRARY))


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return sample_summary(
        tmp_path_factory.mktemp("run") / "run", hosts=("n0", "n1"), slow={2: 1.3}, noise=0.05, num_warmup=2
    )


class Elements(HTMLParser):
    """What a browser would see: the tags with their attributes, and the text outside of scripts."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts = "", []
        self._open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data):
        if not self._open:
            self.text += data
        elif self._open[-1] == "script":
            self.scripts.append((self.tags[-1][1].get("type"), data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sentences(self) -> str:
        return " ".join(self.text.split())

    @property
    def plots(self) -> list[str]:
        return [attributes["id"] for attributes in self.all("div") if attributes.get("class") == "plot"]

    def packed(self, name: str) -> bytes:
        (script,) = (place for place, of in enumerate(self.all("script")) if of.get("id") == name)
        return gzip.decompress(base64.b64decode(self.scripts[script][1]))

    @property
    def data(self) -> dict:
        (content,) = (content for kind, content in self.scripts if kind == "application/json")
        return json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def rest_bytes(content: str) -> int:
    return len(content.encode()) - len(LIBRARY)


def test_the_verdict_is_the_first_thing_said(summary):
    text = Elements(page(summary, VERDICT, sample_plots())).sentences
    places = [
        text.index(part)
        for part in (
            "Persistent straggler",
            "Rank 2 on n1 costs 19.8 %",
            "Own work 30.2 %",
            "Check clock speeds",
            "Where the time",
        )
    ]
    assert places == sorted(places)


def test_each_sentence_of_the_verdict_leads_to_its_evidence(summary):
    verdict = replace(VERDICT, also=("communication-bound: exposed transfers take 3.1 %",))
    content = page(summary, verdict, sample_plots())
    content = re.sub(r'<a class="term"[^>]*>([^<]*)</a>', r"\1", content)
    links = re.findall(r'<p>([^<]*) <a class="evidence" href="#([^"]*)">', content)
    assert [(text.partition(" ")[0], leads_to) for text, leads_to in links] == [
        ("Own", "about-own-delay-by-rank-and-step"),
        ("Communication-bound:", "about-communication-by-kind"),
    ]


def test_whom_the_verdict_names_is_marked_in_every_plot_of_ranks(summary):
    data = Elements(page(summary, VERDICT, sample_plots())).data
    rows = [data[name]["traces"][0]["y"] for name in ("own-delay", "phase-shares", "origins", "core-ranks")]
    rows.append([name for name, *_ in data["slow-step"]["rows"]])
    marks = [["2 n1 ◀"], ["2 n1 ◀"], ["rank 2 n1 ◀"], ["2 n1 ◀"], ["2 n1 ◀"]]
    assert [[row for row in of if "◀" in row] for of in rows] == marks
    alone = Elements(page(summary, VERDICT, sample_plots())).sentences
    assert alone.count("◀ is whom the verdict names.") == 5


def test_a_line_for_the_job_script_is_set_as_code(summary):
    assert "<code>#SBATCH --exclude=n1</code>" in page(summary, VERDICT, PlotData())


def test_a_list_of_hosts_is_not_cut_at_its_commas(summary):
    line = "#SBATCH --exclude=gpu[003,007-009],login1"
    verdict = replace(VERDICT, next=(f"leave them out: {line}, and see why",))
    assert f"<code>{line}</code>, and see why" in page(summary, verdict, PlotData())


@pytest.mark.parametrize(("verdict", "kind"), [(HEALTHY, "verdict healthy"), (VERDICT, "verdict ")])
def test_a_healthy_run_looks_different(summary, verdict, kind):
    assert f'<div class="{kind}">' in page(summary, verdict, PlotData())


def test_a_headline_without_a_mode_in_it_has_it_above(summary):
    made = page(summary, replace(VERDICT, headline="rank 2 is slow"), PlotData())
    assert '<p class="mode">Persistent straggler<span>' in made
    assert "<h1>Rank 2 is slow</h1>" in made


def test_every_plot_described_has_its_place_and_the_other_way_round(summary):
    elements = Elements(page(summary, VERDICT, sample_plots()))
    assert sorted(elements.plots) == sorted(elements.data)
    assert len(elements.plots) == 18
    assert all(attributes.get("aria-label") for attributes in elements.all("div") if attributes.get("class") == "plot")


def test_ids_are_unique_and_links_lead_to_them(summary):
    elements = Elements(page(summary, VERDICT, sample_plots()))
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["href"].removeprefix("#") for attributes in elements.all("a")} <= set(ids)


def test_nothing_in_the_page_can_be_loaded(summary):
    elements = Elements(page(summary, VERDICT, sample_plots()))
    assert not [attributes for _, attributes in elements.tags if "src" in attributes]
    assert not elements.all("link")
    (policy,) = (meta["content"] for meta in elements.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.split("style-src")[0]


def test_the_policy_allows_exactly_the_scripts_of_the_page(summary):
    content = page(summary, VERDICT, sample_plots())
    hashes = set(re.findall(r"'sha256-([^']+)'", content))
    elements = Elements(content)
    code = [text for kind, text in elements.scripts if kind is None]
    allowed = [*(text.encode() for text in code), elements.packed("plot-library")]
    assert hashes == {base64.b64encode(hashlib.sha256(text).digest()).decode() for text in allowed}


def test_the_same_run_gives_the_same_page(summary):
    assert page(summary, VERDICT, sample_plots()) == page(summary, VERDICT, sample_plots())


def test_text_from_files_is_only_text(tmp_path):
    nasty = sample_summary(tmp_path / "run", num_ranks=2, num_steps=12, hosts=(NASTY, "n1"))
    nasty = replace(nasty, run=NASTY, run_id=NASTY, world=replace(nasty.world, mesh=NASTY, emulation=NASTY))
    verdict = SampleVerdict(
        mode=NASTY,
        headline=NASTY,
        why=(NASTY,),
        next=(NASTY,),
        also=(NASTY,),
        culprits=(SampleCulprit(kind=NASTY, id=NASTY, aliases=(NASTY,)),),
    )
    plots = replace(
        sample_plots(num_ranks=2, hosts=(NASTY, "n1")),
        versions=((NASTY, NASTY),),
        leaf_matrix=Matrix(labels=(NASTY, "b"), ratio=np.ones((2, 2))),
        reasons={"node_matrix": NASTY},
        node_matrix=None,
    )
    content = page(nasty, verdict, plots)
    assert NASTY not in content
    assert "<script>alert" not in content
    assert "\x1b" not in content
    elements = Elements(content)
    kinds = [script.get("type", "") for script in elements.all("script")]
    assert kinds == ["application/json", "application/gzip", "application/gzip", "", ""]
    assert elements.sentences.count("<script>alert(1)</script>\\x1b[2J") > 10
    assert "&lt;script&gt;" in elements.data["own-delay"]["traces"][0]["y"][0]


def test_a_page_without_plot_data_says_why_they_are_missing(summary):
    elements = Elements(page(summary, VERDICT, PlotData(reasons={"growth": "it was not asked for"})))
    assert set(elements.plots) == OF_SUMMARY
    assert "no plot of growth with scale: it was not asked for" in elements.sentences
    assert "no matrix of switches: Slurm reported no switches" in elements.sentences
    assert "Growth with scale" not in elements.sentences


def test_what_is_missing_or_cut_off_is_listed(tmp_path):
    hung = sample_summary(tmp_path / "run", hangs=True, missing=(3,), hosts=("n0", "n1"))
    text = Elements(page(hung, VERDICT, PlotData())).sentences
    assert "2 warm-up left out" in text
    assert "no trace of rank 3" in text
    assert "waits for ranks without a trace count as transfer" in text
    assert "never completed: ranks 1-2 inside" in text or "rank 2 on n1 inside" in text
    assert "not closed: the trace of ranks 0-1 on n0, rank 2 on n1" in text


def test_waits_that_are_not_known_are_no_zeros_on_the_page(tmp_path):
    lacking = sample_summary(tmp_path / "run", missing=(3,), hosts=("n0", "n1"))
    elements = Elements(page(lacking, VERDICT, PlotData()))
    assert "waits are not known: operations have no comparable counterpart on every member" in elements.sentences
    assert "wait or transfer" in elements.sentences and "exposed wait 0" not in elements.sentences
    assert {trace["name"] for trace in elements.data["phase-shares"]["traces"]}.isdisjoint({"wait", "transfer"})


def test_a_world_of_one_has_a_page(tmp_path):
    alone = sample_summary(tmp_path / "run", num_ranks=1, num_steps=5)
    elements = Elements(page(alone, HEALTHY, sample_plots(num_ranks=1, num_steps=3, num_nodes=1, hosts=("n0",))))
    assert "wait-transfer" not in elements.plots
    assert "matrix-node" not in elements.plots


@pytest.mark.parametrize("value", [0.0, 7.0, np.nan, np.inf])
def test_constant_and_unknown_values_are_no_error(summary, value):
    flat = np.full(38, value)
    plots = PlotData(
        step=np.arange(38),
        step_ms=flat,
        own_delay_ms=np.full((2, 38), value),
        rank_labels=("0", "1"),
        communication_share=flat,
        leaf_matrix=Matrix(labels=("a", "b"), ratio=np.full((2, 2), value)),
        clocks=(HostClock(host="n0", time_s=flat, halfwidth_us=flat, residual_us=flat, allowed_us=flat),),
    )
    assert "step-times" in Elements(page(summary, VERDICT, plots)).data


def test_no_steps_and_empty_arrays_are_no_error(summary):
    none = np.zeros(0)
    empty = Growth(k=(), amplification=(), low=(), high=(), null=(), exponent=None, exponent_interval=None)
    plots = PlotData(
        step=np.zeros(0, np.int64),
        step_ms=none,
        own_delay_ms=np.zeros((0, 0)),
        growth=empty,
        clocks=(HostClock(host="n0", time_s=none, halfwidth_us=none, residual_us=none, allowed_us=none),),
        leaf_matrix=Matrix(labels=(), ratio=np.zeros((0, 0))),
    )
    assert set(Elements(page(summary, VERDICT, plots)).plots) == OF_SUMMARY


def test_causes_are_plots_with_their_figures(summary):
    elements = Elements(page(summary, VERDICT, PlotData()))
    origins, gains = (elements.data[name]["traces"] for name in ("origins", "gains"))
    assert origins[0]["y"][0] == "rank 2 n1 ◀"
    assert gains[0]["y"][:2] == [gain.name for gain in summary.causes.gains[:2]]
    assert gains[0]["x"][0] == pytest.approx(100 * summary.causes.gains[0].gain_share, rel=1e-3)
    assert "work of rank 2" in elements.sentences
    assert "ignore smaller gains" in elements.sentences


def test_what_others_passed_on_is_told_apart(summary):
    rows = tuple(replace(row, propagated_share=0.4) for row in summary.causes.origins)
    chained = replace(summary, causes=replace(summary.causes, origins=rows))
    direct, passed = Elements(page(chained, VERDICT, PlotData())).data["origins"]["traces"]
    whole = 100 * summary.causes.origins[0].step_share
    assert [direct["x"][0], passed["x"][0]] == pytest.approx([0.6 * whole, 0.4 * whole], rel=1e-3)


def test_an_unknown_cause_is_a_sentence_in_place_of_a_plot(summary):
    elements = Elements(page(replace(summary, causes=None), VERDICT, PlotData()))
    assert not {"origins", "gains"} & set(elements.plots)
    assert "no plot of where waiting began" in elements.sentences


def test_attempts_stand_beside_each_other(summary):
    first = AttemptRow(
        attempt=0,
        world_size=8,
        num_ranks=8,
        hosts=("n0", NASTY),
        mesh=summary.world.mesh,
        num_steps=0,
        first=None,
        last=None,
        p50_ns=None,
        num_not_closed=8,
        num_inside=0,
    )
    last = replace(first, attempt=1, world_size=4, num_ranks=4, hosts=("n0", "n1"), num_not_closed=0)
    content = page(replace(summary, attempt=1, attempts=(0, 1), history=(first, last)), VERDICT, PlotData())
    assert "<script>alert" not in content
    text = Elements(content).sentences
    assert "8 of 8 traces not closed" in text
    assert "attempt 1 compared with 0: 4 ranks instead of 8; with n1; without <script>alert(1)</script>" in text


def test_names_of_columns_break_on_terminals_alone(summary):
    rank = RankCores(rank=1, host="n0", nice=0, num_cpus=2, waiting=0.5, work_ns=1e8, phases=(("forward", 2e7),))
    content = page(replace(summary, rank_cores=(rank,)), VERDICT, sample_plots())
    names = re.findall("<th[^>]*>(.*?)</th>", content, re.DOTALL)
    assert "waits in forward" in names
    assert [name for name in names if "\n" in name or r"\n" in name] == []


def test_skew_is_read_in_words(summary):
    row = SensitivityRow(
        op="all_reduce", group_size=4, size_bytes=4096, slope=-0.5, interval=(-0.6, -0.4), num_operations=40
    )
    text = Elements(page(replace(summary, sensitivity=(row,)), VERDICT, PlotData())).sentences
    assert "-500 us-600 us to -400 uslonger when together: contention" in text


def test_a_large_run_stays_below_two_megabytes_beside_the_library(summary):
    plots = sample_plots(num_ranks=1024, num_steps=10_000, num_nodes=300, hosts=tuple(f"n{i}" for i in range(64)))
    rows = tuple(replace(summary.ranks[0], rank=rank) for rank in range(1024))
    assert rest_bytes(page(replace(summary, ranks=rows), VERDICT, plots)) < 2_000_000


def test_many_ranks_are_shown_as_roles_and_extremes(summary):
    excess = summary.ranks[0].excess
    rows = tuple(
        replace(summary.ranks[0], rank=rank, excess=replace(excess, share=0.5 if rank == 77 else rank / 1e4))
        for rank in range(200)
    )
    plot = phase_shares(replace(summary, ranks=rows))
    names = plot.traces[0]["y"]
    assert len(names) <= MAX_BARS
    assert names[0].startswith("pp0 tp0")
    assert names[1].startswith("77 ")
    assert "24 of 200 ranks" in plot.caption


def test_the_shares_of_a_row_add_up(summary):
    plot = phase_shares(summary)
    assert np.sum([trace["x"] for trace in plot.traces], axis=0) == pytest.approx(np.full(4, 100), abs=0.1)


@pytest.mark.parametrize("shape", [(3, 5), (1, 2500), (700, 10), (1025, 2001)])
def test_a_bin_keeps_its_largest_magnitude_with_its_sign(shape):
    random = np.random.default_rng(shape[1])
    values = random.normal(size=shape)
    values[random.random(shape) < 0.2] = np.nan
    found, by_row, by_column = binned(values, 512, 1000)
    assert (found.shape[0] <= 512, found.shape[1] <= 1000) == (True, True)
    assert found.shape == (-(-shape[0] // by_row), -(-shape[1] // by_column))
    for row, column in zip(random.integers(0, found.shape[0], 50), random.integers(0, found.shape[1], 50), strict=True):
        block = values[row * by_row : (row + 1) * by_row, column * by_column : (column + 1) * by_column]
        block = block[np.isfinite(block)]
        expected = block[np.argmax(np.abs(block))] if len(block) else np.nan
        assert found[row, column] == pytest.approx(expected, nan_ok=True)


def test_packing_keeps_small_values_beside_large_ones():
    values = np.array([[100.0, -1.0, 0.1], [np.nan, 0.0, -100.0]])
    made = packed(values)
    codes = np.frombuffer(base64.b64decode(made["bytes"]), np.int8).reshape(2, made["columns"]).astype(float)
    back = np.where(codes == -128, np.nan, np.sign(codes) * (codes / 127) ** 2 * made["scale"])
    assert back == pytest.approx(values, rel=0.1, nan_ok=True)


def test_a_long_series_keeps_its_extremes():
    random = np.random.default_rng(3)
    values = random.normal(10, 1, 10_001)
    values[1234], values[77] = 99.0, np.nan
    found = bins(values, 1500)
    assert len(found.first) <= 1500
    assert found.high.max() == 99.0
    for index in (0, 11, 700, len(found.first) - 1):
        block = values[found.first[index] :][: found.size]
        assert (found.low[index], found.high[index]) == (np.nanmin(block), np.nanmax(block))


def test_a_long_series_is_drawn_with_its_band_and_says_so(summary):
    step = np.arange(10_000)
    plot = step_times(step, np.ones(10_000), summary.throughput)
    assert len(plot.traces) == 3
    assert "median of 7 steps" in plot.caption


def test_the_distribution_counts_every_step():
    values = np.append(np.random.default_rng(1).normal(40, 1, 500), [400.0, np.nan])
    plot = step_distribution(values)
    assert sum(plot.traces[0]["y"]) == 501
    assert "1 step beyond" in plot.caption


def test_colours_of_the_delay_do_not_end_below_a_slow_rank():
    delay = np.random.default_rng(1).normal(0, 1, (1024, 100))
    delay[5] += 50
    trace = own_delay(np.arange(100), delay, [f"{rank} n" for rank in range(1024)]).traces[0]
    assert trace["zmax"] == pytest.approx(51, abs=1)


def test_thinning_of_the_delay_is_said():
    labels = [f"{rank} n" for rank in range(1024)]
    assert (
        "largest magnitude of 2 ranks and 3 steps" in own_delay(np.arange(3000), np.ones((1024, 3000)), labels).caption
    )
    assert "Each cell" not in own_delay(np.arange(30), np.ones((10, 30)), labels[:10]).caption


def test_a_matrix_of_many_nodes_is_thinned_out():
    labels = tuple(f"n{node}" for node in range(512))
    plot = transfer_matrix(Matrix(labels=labels, ratio=np.ones((512, 512))), "node", "nodes")
    assert len(plot.traces[0]["x"]) == 256
    assert "2 by 2 nodes" in plot.caption


@pytest.mark.parametrize(
    ("largest", "ticks"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (1000, [*2 ** np.arange(10), 1000])]
)
def test_growth_is_marked_at_powers_of_two_and_at_its_end(largest, ticks):
    k = np.unique([1, largest])
    ones = (1.0,) * len(k)
    curve = Growth(
        k=tuple(k.tolist()), amplification=ones, low=ones, high=ones, null=ones, exponent=None, exponent_interval=None
    )
    plot = growth(curve, "rank")
    ticks = [tick for tick in ticks if tick < 0.75 * largest or tick == largest]
    assert plot.layout["xaxis"]["tickvals"] == ticks


def test_names_that_are_cut_stay_apart():
    assert unique([plot_text("a" * 30, 5), plot_text("a" * 40, 5), "b"]) == ["aaaa…", "aaaa… (2)", "b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": np.arange(3), "step_ms": np.ones(2)},
        {"step_ms": np.ones(2)},
        {"step": np.arange(3), "own_delay_ms": np.ones((2, 3)), "rank_labels": ("0",)},
        {"step": np.arange(3), "communication_share": np.ones(4)},
        {"step": np.arange(3), "parts_ms": {"forward": np.ones(2), "wait": None}},
    ],
)
def test_plot_data_of_different_lengths_is_refused(wrong):
    with pytest.raises(ValueError, match="lengths"):
        PlotData(**wrong)


def test_the_page_replaces_the_one_before(tmp_path, summary):
    path = tmp_path / "report.html"
    path.write_text("before")
    write_html(path, summary, VERDICT, PlotData())
    assert path.read_text(encoding="utf-8") == page(summary, VERDICT, PlotData())
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path, summary):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError):
        write_html(tmp_path / "report.html", summary, VERDICT, PlotData())
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def _jitter(**changes: object) -> Jitter:
    growth = Growth(k=(1, 4), amplification=(1.0, 1.1), low=(), high=(), null=(), exponent=0.42, exponent_interval=None)
    point = Prediction(num_nodes=64, loss_share=0.123, interval=(0.1, 0.15), is_speculative=True)
    jitter = Jitter(
        ranks=(0, 1, 2, 3),
        num_steps=38,
        num_segments=2,
        amplification=1.102,
        interval=(1.08, 1.12),
        persistent=1.07,
        persistent_null=1.01,
        transient=1.03,
        loss_share=0.093,
        null=1.05,
        null_interval=(1.04, 1.06),
        comparison="above",
        is_node_unit=False,
        common_share=0.1,
        rank_share=0.7,
        residual_share=0.2,
        noise_intensity=0.05,
        noise_amplification=1.4,
        compute_bound_share=1.0,
        num_regime_switches=0,
        growth=growth,
        predictions=Predictions(refused="", label="waiting only", points=(point,)),
    )
    return replace(jitter, **changes)


def test_jitter_is_told_with_its_null_and_its_prediction(summary):
    text = Elements(page(replace(summary, jitter=_jitter()), VERDICT, PlotData())).sentences
    assert "9.3 % of the step time is lost to waiting for the slowest" in text
    assert "events avoid each other" in text
    assert "waiting only" in text
    assert "12.3 %10.0 % to 15.0 %yes" in text


def test_a_refused_prediction_says_why(summary):
    refused = Predictions(refused="only 12 exceedances", label="", points=())
    jitter = _jitter(
        predictions=refused, interval=None, null=None, common_share=None, growth=None, noise_intensity=None
    )
    text = Elements(page(replace(summary, jitter=jitter), VERDICT, PlotData())).sentences
    assert "not extrapolated: only 12 exceedances" in text
    assert "Loss at larger scales" not in text


def test_pairs_that_are_alike_have_no_colour_that_alarms():
    plot = transfer_matrix(Matrix(labels=("a", "b"), ratio=np.array([[1.0, 1.02], [1.02, np.nan]])), "node", "nodes")
    assert "No pair differs from it by more than 2 %." in plot.caption
    assert (plot.traces[0]["zmin"], plot.traces[0]["zmax"], plot.traces[0]["colorscale"]) == (-100, 100, "@diverging")


def test_the_slowest_pair_is_the_most_orange():
    (trace,) = transfer_matrix(Matrix(labels=("a", "b"), ratio=np.array([[1.0, 4.0], [4.0, 0.5]])), "n", "ns").traces
    assert trace["packed"]["scale"] == trace["zmax"] == 300


@pytest.mark.parametrize(
    ("allowed_us", "said"),
    [(12.0, "None is larger than those errors allow."), (5.0, "2 of 3 are larger than those errors allow")],
)
def test_a_residual_above_the_line_is_explained(allowed_us, said):
    values = np.array([1.0, 10.0, 10.0, 1.0, 1.0])
    residual = np.array([np.nan, 10.0, -10.0, 1.0, np.nan])
    clock = HostClock(
        host="n1", time_s=values, halfwidth_us=values, residual_us=residual, allowed_us=np.full(5, allowed_us)
    )
    caption = clock_error([clock]).caption
    assert "may be above its line" in caption and said in caption


def test_a_blank_row_of_own_delay_is_explained():
    plots = replace(sample_plots(), delay_remark="Of two ranks of a role the faster one is blank.")
    drawn = own_delay(plots.step, plots.own_delay_ms, plots.rank_labels, plots.delay_remark)
    assert drawn.caption.endswith("last colour. Of two ranks of a role the faster one is blank.")


def test_a_curve_of_two_points_is_not_drawn(summary):
    elements = Elements(page(summary, VERDICT, sample_plots(num_ranks=2)))
    assert "growth" not in elements.data
    assert "no plot of growth with scale: that needs three or more that wait for each other" in elements.sentences


def test_a_library_that_names_the_end_of_a_script_does_not_end_it(summary, monkeypatch):
    code = 'x = "</script>"; y = "</SCRIPT>"'
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed(code))
    elements = Elements(page(summary, VERDICT, PlotData()))
    assert elements.packed("plot-library").decode() == code
    assert len(elements.all("script")) == 5


def test_the_bundle_is_the_one_that_its_note_names():
    folder = files("hpcpace.report.html").joinpath("assets")
    note, code = folder.joinpath("README.md").read_text(), gzip.decompress(plot_library())
    assert hashlib.sha256(code).hexdigest() in note
    version = re.search(rb"plotly\.js \(cartesian - minified\) v([\d.]+)", code)[1].decode()
    assert f"plotly.js {version} " in note
    assert hashlib.sha256(folder.joinpath("fflate.umd.js").read_bytes()).hexdigest() in note
    assert all("MIT License" in folder.joinpath(f"{name}-LICENSE").read_text() for name in ("plotly", "fflate"))


def test_the_page_carries_the_licenses_of_what_is_in_it(summary):
    content = page(summary, VERDICT, PlotData())
    assert "Plotly Technologies Inc." in content and "Arjun Barrett" in content
    assert content.count("Permission is hereby granted, free of charge") == 2


def test_the_page_holds_summary_json(summary):
    content = Elements(page(summary, VERDICT, PlotData())).packed("summary-json").decode()
    assert content == json_text(summary.to_json())


def test_terms_lead_to_the_glossary_where_a_section_has_them_first(summary):
    content = page(summary, VERDICT, sample_plots())
    sections = re.split(r"(?=<section|<div class=\"verdict)", content)
    links = [re.findall(r'<a class="term" href="#([^"]*)">', part) for part in sections]
    assert all(len(of) == len(set(of)) for of in links)
    used = {link for of in links for link in of}
    expected = {"term-" + name for name in ("exposed", "a-amplification", "half-width", "own-work", "role", "wait")}
    assert expected | {"term-excess", "term-transfer", "term-busy"} <= used
    listed = set(re.findall(r'<dt id="([^"]*)"', content))
    assert used == listed < {term.anchor for term in GLOSSARY}


def test_a_page_without_terms_has_no_glossary():
    made = html_page(Document(heading="", title="", sections=[Section("rows", (Table(("a",), [Row(("1",))]),))]))
    assert 'class="glossary"' not in made and ">Terms<" not in made


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("exposed wait", ["exposed", "wait"]),
        ("Amplification A, A of jitter proper", ["A, amplification", "A, amplification", "jitter"]),
        ("half-widths of A(k)", ["half-width", "A, amplification"]),
        ("A rank waits", ["wait"]),
        ("await n-wait wait-3 waiter", []),
    ],
)
def test_terms_are_found_as_whole_words(text, names):
    assert [term.name for _, _, term in terms_in(text)] == names


def test_a_column_of_commands_can_be_copied_and_a_card_names_its_columns():
    rows = [Row(("rank 2", "srun -c 2 <x>"), ranks="2", hosts='"n1"')]
    made = html_page(
        Document(heading="", title="", sections=[Section("fixes", (Table(("who", "it's a fix"), rows, command=1),))])
    )
    assert '<td class="text command">srun -c 2 &lt;x&gt;</td>' in made
    assert '<tr data-ranks="2" data-hosts="&#34;n1&#34;">' in made
    (attributes,) = Elements(made).all("table")
    assert attributes["style"] == r"--head-1:'who';--head-2:'it\'s a fix'"


def test_lanes_have_every_stretch_of_every_rank():
    slow = sample_plots().slow_step
    plot = slow_step(slow, named={2})
    bars = {trace["name"]: list(zip(trace["y"], trace["base"], trace["x"], strict=True)) for trace in plot.traces}
    assert list(bars) == ["forward", "backward", "wait", "transfer"]
    assert bars["wait"] == [(name, 30, 9) for name in ("0 n0", "1 n0", "2 n1 ◀", "3 n1")]
    assert sum(map(len, bars.values())) == sum(len(lane.part) for lane in slow.lanes)
    assert "Step 9 took 41.0 ms, the median of steps is 38.0 ms." in plot.caption
    assert "ranks are shown" not in plot.caption


def test_lanes_say_which_ranks_and_which_step_they_show():
    slow = replace(sample_plots(num_ranks=40).slow_step, slowest=77, slowest_ms=120.0)
    caption = slow_step(slow).caption
    assert "16 of 40 ranks are shown: those that the verdict names" in caption
    assert "slowest of those taken apart operation by operation; the slowest of all is step 77 (120 ms)" in caption


def test_the_glossary_is_in_alphabetical_order_and_its_anchors_are_unique():
    names = [term.name.lower() for term in GLOSSARY]
    assert names == sorted(names)
    assert len({term.anchor for term in GLOSSARY}) == len(GLOSSARY)


def test_rows_say_which_rank_and_host_they_are_about(summary):
    elements = Elements(page(summary, VERDICT, sample_plots()))
    rows = [(row["data-ranks"], row.get("data-hosts")) for row in elements.all("tr") if "data-ranks" in row]
    assert {(str(row.rank), row.host) for row in summary.ranks} <= set(rows)
    assert elements.data["own-delay"]["rows"][2] == ["2 n1 ◀", "2", "n1"]


def test_rows_that_were_joined_are_about_all_their_ranks():
    labels = [f"{rank} n{rank // 8}" for rank in range(1024)]
    plot = own_delay(np.arange(3), np.ones((1024, 3)), labels)
    assert plot.rows[4] == ("8 n1 …", "8-9", "n1")


def test_what_was_emulated_and_which_clock_is_wrong_are_told_at_the_top(tmp_path):
    wrong = sample_summary(
        tmp_path / "run", hosts=("n1", "n2", "n3", "n4"), noise=0.1, clock_error_ns={2: 5_000_000}, num_steps=20
    )
    wrong = replace(wrong, world=replace(wrong.world, emulation="16 CPUs are claimed and this machine has 2"))
    text = Elements(page(wrong, VERDICT, PlotData())).sentences
    places = [text.index(part) for part in ("Lab: 16 CPUs", "Warning: the clock of n3", "Where the time went")]
    assert max(places[:2]) < places[2]
