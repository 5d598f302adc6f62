"""The HTML report in a real browser: that it is drawn, fits a desk and a phone, and asks nobody for anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_sample import HEALTHY, NASTY, SampleVerdict, sample_plots, sample_summary

from experiments.chromium import Browser
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.report.run_report import write_html

WIDTHS = (1280, 390)
pytestmark = pytest.mark.tool


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, tuple[Path, int]]:
    """Return the pages by name, and how many plots each of them has at least."""
    folder = tmp_path_factory.mktemp("pages")
    plain = sample_summary(folder / "plain", hosts=("n0", "n1"), slow={2: 1.3}, noise=0.05)
    nasty = sample_summary(folder / "nasty", hosts=(NASTY, "n1"), missing=(3,), hangs=True)
    alone = sample_summary(folder / "alone", num_ranks=1, num_steps=5)
    many = sample_summary(
        folder / "many", num_ranks=72, num_steps=12, hosts=tuple(f"node-{n:04d}.rack" for n in range(9))
    )
    hosts = tuple(f"gpu-{n:03d}.cluster.example.org" for n in range(16))
    parts = {"sync_wait": 10.0, "sync_transfer": 5.0}
    synced = tuple(
        replace(row, shares=row.shares | {"sync_wait": 0.1}, parts_ns=row.parts_ns | parts) for row in plain.ranks
    )
    plain = replace(plain, ranks=synced)
    made = {
        "plain": (plain, SampleVerdict(), sample_plots(), 13),
        "nasty": (nasty, SampleVerdict(headline=NASTY * 3, why=(NASTY,)), sample_plots(hosts=(NASTY, "n1")), 10),
        "alone": (alone, HEALTHY, PlotData(), 1),
        "many": (many, HEALTHY, sample_plots(num_ranks=600, num_steps=2000, num_nodes=48, hosts=hosts), 11),
    }
    for name, (summary, verdict, plots, _) in made.items():
        write_html(folder / f"{name}.html", summary, verdict, plots)
    return {name: (folder / f"{name}.html", count) for name, (*_, count) in made.items()}


_SCROLL = """(async () => {
  for (const plot of document.querySelectorAll(".plot")) {
    plot.scrollIntoView({ behavior: "instant" });
    await new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)));
  }
  scrollTo({ top: 0, behavior: "instant" });
})()"""


_COLOR = "getComputedStyle(document.body).color"


def _open(browser: Browser, path: Path, width: int, **how: bool) -> None:
    """Open a page and read it to its end, which draws the plots."""
    browser.open(path.as_uri(), width=width, **how)
    browser.evaluate(_SCROLL)
    browser.wait_for("Number(document.documentElement.dataset.drawn) === document.querySelectorAll('.plot').length")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plain", "nasty", "alone", "many"])
def test_a_page_is_drawn_without_an_error_a_request_or_an_overflow(browser, pages, name, width):
    path, num_plots = pages[name]
    _open(browser, path, width, touch=width < 600)
    described = browser.evaluate("Object.keys(JSON.parse(document.getElementById('plot-data').textContent)).length")
    assert described >= num_plots
    assert browser.evaluate("document.querySelectorAll('.plot').length") == described
    assert browser.evaluate("document.querySelectorAll('.plot .plot-container .xaxislayer-above').length") == described
    assert browser.evaluate("[...document.querySelectorAll('.plot .main-svg')].every((svg) => svg.clientHeight > 60)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    requests = {event["request"]["url"] for event in browser.said("Network.requestWillBeSent")}
    assert {url for url in requests if not url.startswith("data:")} == {path.as_uri()}
    assert not browser.said("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
    assert not [event for event in browser.said("Runtime.consoleAPICalled") if event["type"] in ("error", "warning")]


def test_a_host_that_is_named_like_a_script_is_shown_by_its_name(browser, pages):
    path, _ = pages["nasty"]
    _open(browser, path, 1280)
    label = browser.evaluate("document.querySelector('#own-delay .yaxislayer-above').textContent")
    assert "0 <script>alert(1)</s" in label
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("<script>alert(1)</script>\\x1b")
    assert browser.evaluate("document.scripts.length") == 6  # plotly.js was unpacked into one


def test_a_script_that_was_slipped_in_does_not_run(browser, pages, tmp_path):
    changed = tmp_path / "changed.html"
    content = pages["alone"][0].read_text(encoding="utf-8")
    changed.write_text(content.replace("<main>", "<main><script>window.ran = 1</script>"), encoding="utf-8")
    _open(browser, changed, 1280)
    assert browser.evaluate("window.ran === undefined")
    assert browser.said("Log.entryAdded")


def test_the_heat_map_has_the_values_that_were_packed(browser, pages):
    _open(browser, pages["plain"][0], 1280)
    found = browser.evaluate("document.getElementById('own-delay').data[0].z")
    plots = sample_plots()
    scale = abs(plots.own_delay_ms).max()
    assert [len(found), len(found[0])] == list(plots.own_delay_ms.shape)
    assert all(
        abs(a - b) <= 0.01 * scale
        for row, own in zip(found, plots.own_delay_ms, strict=True)
        for a, b in zip(row, own, strict=True)
    )


def test_hatched_bars_keep_their_colour(browser, pages):
    _open(browser, pages["plain"][0], 1280)
    fills = browser.evaluate(
        "[...document.querySelectorAll('#phase-shares pattern rect')].map((rect) => getComputedStyle(rect).fill)"
    )
    assert {"rgb(213, 94, 0)", "rgb(224, 161, 0)"} <= set(fills)


def test_plots_follow_the_width_of_the_window(browser, pages):
    _open(browser, pages["plain"][0], 1280)
    wide = browser.evaluate("document.querySelector('#growth .main-svg').clientWidth")
    browser.call("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=1, mobile=False)
    browser.wait_for("document.querySelector('#growth .main-svg').clientWidth < 700")
    assert wide > 900
    assert browser.evaluate("document.documentElement.scrollWidth") <= 700


def test_dark_and_light_differ_in_page_and_plots(browser, pages):
    ink = "getComputedStyle(document.querySelector('#growth .xtick text')).fill + getComputedStyle(document.body).color"
    _open(browser, pages["plain"][0], 1280)
    light = browser.evaluate(ink)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="", features=[scheme])
    browser.wait_for("getComputedStyle(document.querySelector('#growth .xtick text')).fill === 'rgb(233, 234, 235)'")
    assert browser.evaluate(ink) != light


def test_paper_is_light_narrow_and_has_every_figure(browser, pages):
    _open(browser, pages["plain"][0], 1280, dark=True)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for("document.querySelector('#growth .main-svg').clientWidth === 660")
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 35)"
    assert browser.evaluate("document.querySelector('details').open")
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.wait_for("document.querySelector('#growth .main-svg').clientWidth > 900")


def test_a_key_reaches_every_table_that_scrolls(browser, pages):
    _open(browser, pages["plain"][0], 390)
    assert browser.evaluate("[...document.querySelectorAll('.table')].every((table) => table.tabIndex === 0)")


def test_a_window_that_shows_all_plots_has_them_once_the_page_has_loaded(browser, pages):
    browser.open(pages["plain"][0].as_uri(), width=1280, height=12_000)
    num_plots = browser.evaluate("document.querySelectorAll('.plot').length")
    assert browser.evaluate("Number(document.documentElement.dataset.drawn)") == num_plots


def test_plots_wait_until_they_are_near(browser, pages):
    browser.open(pages["many"][0].as_uri(), width=1280)
    browser.evaluate("document.querySelector('.plot').scrollIntoView({ behavior: 'instant' })")
    browser.wait_for("document.querySelector('.plot').childElementCount > 0")
    assert browser.evaluate("Number(document.documentElement.dataset.drawn)") < 11
    assert browser.evaluate("[...document.querySelectorAll('.plot')].at(-1).childElementCount") == 0


def test_paper_has_every_plot_also_of_a_page_that_nobody_has_read(browser, pages):
    browser.open(pages["plain"][0].as_uri(), width=1280)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    undrawn = "document.querySelectorAll('.plot:not(:has(.xaxislayer-above))').length"
    assert browser.evaluate(undrawn) == 0


TABLE = "#about-phases-by-rank ~ details"
RANKS = (
    f"[...document.querySelectorAll('{TABLE} tbody tr:not([hidden]) td:first-child')].map((cell) => cell.textContent)"
)


@pytest.fixture
def opened(browser, pages) -> Browser:
    """Return the browser with a page of four ranks, and their table open."""
    _open(browser, pages["plain"][0], 1280)
    browser.evaluate(f"document.querySelector('{TABLE}').open = true")
    return browser


def _press_enter(browser: Browser) -> None:
    key = {"key": "Enter", "code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **key)


def _fill(browser: Browser, *rows: str) -> None:
    """Put other rows into the table, their cells divided by `|`."""
    made = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.split('|'))}</tr>" for row in rows)
    browser.evaluate(f"document.querySelector('{TABLE} tbody').innerHTML = {json.dumps(made)}")


def test_a_click_or_a_key_sorts_a_table_and_says_so(opened):
    head = f"document.querySelector('{TABLE} th:nth-child(6)')"
    shown = f"[...document.querySelectorAll('{TABLE} td:nth-child(6)')].map((cell) => parseFloat(cell.textContent))"
    before = opened.evaluate(shown)
    opened.evaluate(f"{head}.click()")
    assert opened.evaluate(shown) == sorted(before)
    assert opened.evaluate(f"{head}.ariaSort") == "ascending"
    opened.evaluate(f"{head}.querySelector('button').focus()")
    _press_enter(opened)
    assert opened.evaluate(f"{head}.ariaSort") == "descending"
    assert opened.evaluate(shown) == sorted(before, reverse=True)


def test_quantities_are_sorted_by_size_whatever_their_unit_and_unknown_ones_last(opened):
    _fill(opened, "1.50 s", "?", "850 ns", "12.3 us", "4.56 ms", "\u2013")
    for expected in (["850 ns", "12.3 us", "4.56 ms", "1.50 s"], ["1.50 s", "4.56 ms", "12.3 us", "850 ns"]):
        opened.evaluate(f"document.querySelector('{TABLE} th').click()")
        assert opened.evaluate(RANKS) == [*expected, "?", "\u2013"]


def test_the_reader_chooses_ranks_and_hosts(opened):
    plotted = "[...document.querySelectorAll('#own-delay .yaxislayer-above text')].map((text) => text.textContent[0])"
    plotted += ".sort()"
    assert opened.evaluate(RANKS) == opened.evaluate(plotted) == ["0", "1", "2", "3"]
    for typed, ranks in (("2", "2"), ("1-2", "12"), ("n1", "23"), ("0, N1", "023"), ("x", ""), ("", "0123")):
        opened.evaluate(f"choose.value = {typed!r}; choose.dispatchEvent(new Event('input'))")
        opened.wait_for(f"{plotted}.join('') === '{ranks}'")
        assert opened.evaluate(RANKS) == list(ranks)
        said = f"{len(ranks)} of 4 ranks" if typed else ""
        assert opened.evaluate("document.getElementById('chosen').textContent") == said


def _saved(browser: Browser, click: str) -> str:
    """Return the content of the file that a click saves."""
    browser.evaluate("window.made = []; URL.createObjectURL = (blob) => { made.push(blob); return '#'; }")
    browser.evaluate(click)
    browser.wait_for("made.length === 1")
    return browser.evaluate("made[0].text()")


def test_a_table_is_saved_with_numbers_and_without_formulas(opened):
    _fill(opened, '0|=1+1|a"b,c|12.0 ms|50.0 %|+1.5 %|\u2013|1.50 s|3 us')
    saved = _saved(opened, f"document.querySelector('{TABLE} caption button').click()")
    units = "step (ms),busy (%),excess over role (%),noise,exposed wait (ms),exposed transfer (ms)"
    assert saved == f'rank,host,role,{units}\n0,\'=1+1,"a""b,c",12,50,1.5,,1500,0.003\n'


def test_summary_json_is_saved_from_the_page(opened):
    found = json.loads(_saved(opened, "document.getElementById('save-summary').click()"))
    assert found["schema"] == "hpcpace-summary/2"
    assert len(found["ranks"]) == 4


def test_a_command_is_copied_also_without_a_clipboard(opened):
    copied = "document.addEventListener('copy', () => { window.copied = document.activeElement.value; })"
    opened.evaluate(f"{copied}; navigator.clipboard.writeText = () => Promise.reject()")
    opened.evaluate("document.querySelector('.verdict .copy').focus()")
    _press_enter(opened)
    opened.wait_for("window.copied")
    assert opened.evaluate("copied") == "#SBATCH --exclude=n1"


def test_only_a_whole_command_can_be_copied(browser, pages, tmp_path):
    lines = ("srun -c 8 ...  # or -c 4", "hpcpace audit --from RUN", "srun ... train.py", "# reseat the cable")
    changed = tmp_path / "changed.html"
    content = pages["alone"][0].read_text(encoding="utf-8")
    codes = "".join(f"<code>{line}</code>" for line in lines)
    changed.write_text(content.replace("<main>", f"<main>{codes}"), encoding="utf-8")
    _open(browser, changed, 1280)
    labels = browser.evaluate("[...document.querySelectorAll('main > .copy')].map((made) => made.ariaLabel)")
    assert labels == ["Copy srun -c 8"]


def test_the_chosen_colours_are_kept(browser, pages):
    _open(browser, pages["plain"][0], 1280)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(_COLOR) == "rgb(233, 234, 235)"
    for _ in range(10):  # what one process of the browser keeps, its next one may see a little later
        _open(browser, pages["plain"][0], 1280)
        if browser.evaluate(_COLOR) == "rgb(233, 234, 235)":
            break
    assert browser.evaluate(_COLOR) == "rgb(233, 234, 235)"
    browser.evaluate("localStorage.clear()")


def test_a_term_is_explained_to_the_keyboard(opened):
    assert opened.evaluate("document.getElementById('tip').hidden")
    opened.evaluate("document.querySelector('a.term').focus()")
    assert opened.evaluate("document.getElementById('tip').textContent.length") > 20
    assert not opened.evaluate("document.getElementById('tip').hidden")


def test_rows_are_cards_on_a_phone(browser, pages):
    _open(browser, pages["plain"][0], 375, touch=True)
    browser.evaluate(f"document.querySelector('{TABLE}').open = true")
    cell = f"document.querySelector('{TABLE} td:nth-child(2)')"
    assert browser.evaluate(f"getComputedStyle({cell}, '::before').content") == '"host"'
    assert browser.evaluate(f"{cell}.parentElement.getBoundingClientRect().right") <= 375
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
