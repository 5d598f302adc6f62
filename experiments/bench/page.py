"""What it costs to open a report's page: `python -m experiments.bench.page --ranks 4 64 1024`.

Headless Chromium opens the page of a synthetic run from a server on this machine, without a limit and at the rate of a
slow link, which Chromium keeps to (`Network.emulateNetworkConditions`). Times come from the page's own Performance
API: first paint with content; interactive, once it has loaded and the last task of more than 50 ms before two quiet
seconds has ended; blocked, what those tasks have beyond 50 ms from first paint on, as Lighthouse has it. Then the page
is read to its end, which draws all plots, its longest table is sorted, and a rank is chosen. Needs Chromium.

Options:
  --ranks N...  make runs of this many ranks [4 64 1024]
  --steps N  [60]
  --repeats N  [3]
  --quiet-ms N  end once no long task has come for so long [2000]
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from experiments.bench.pairs import medians
from experiments.chromium import INSTALL, Browser, find_chromium
from experiments.options import command_line
from experiments.synthetic_run import SyntheticRun
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.report.run_report import write_html
from hpcpace.trace.attempt_reader import read_attempt

_SLOW_MBIT, _SLOW_RTT_MS = 10, 40
_RANKS_PER_NODE, _STAGES = 8, 4
_SCRIPT = Path(__file__).with_suffix(".js")


def main() -> None:
    args = command_line(__doc__)
    program = find_chromium()
    if program is None:
        sys.exit(f"no Chromium: {INSTALL}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for num_ranks in args.ranks:
            path = write_page(folder / str(num_ranks), num_ranks, args.steps)
            with Browser(program, folder / "profile") as browser:
                browser.call("Page.addScriptToEvaluateOnNewDocument", source=_SCRIPT.read_text(encoding="utf-8"))
                print(f"{num_ranks} ranks: {path.stat().st_size / 1e6:.2f} MB", flush=True)
                for link in (0, _SLOW_MBIT):
                    print_medians(link, [measure(browser, path, link, args.quiet_ms) for _ in range(args.repeats)])


def write_page(folder: Path, num_ranks: int, num_steps: int) -> Path:
    """Write the page of a run with one slow rank."""
    hosts = tuple(f"n{node}" for node in range(-(-num_ranks // _RANKS_PER_NODE)))
    stages = min(_STAGES, num_ranks // 2)
    made = SyntheticRun(
        num_ranks=num_ranks, num_steps=num_steps, pipeline=stages, hosts=hosts, slow={num_ranks // 2: 1.3}, noise=0.05
    )
    run = made.write(folder)
    found = read_attempt(run.attempt(0))
    analysis = analyze_traces(run, run.attempt(0), found, Selection())
    write_html(run.report_html, analysis.summary, main_verdict(analysis.summary.verdict), analysis.plots)
    return run.report_html


def measure(browser: Browser, path: Path, link_mbit: int, quiet_ms: int) -> dict[str, float]:
    """Return times in milliseconds and numbers of DOM nodes of opening a page; a link of 0 Mbit/s has no limit."""
    rate = link_mbit * 1e6 / 8 if link_mbit else -1
    latency_ms = _SLOW_RTT_MS if link_mbit else 0
    browser.call(
        "Network.emulateNetworkConditions",
        offline=False, latency=latency_ms, downloadThroughput=rate, uploadThroughput=rate,
    )  # fmt: skip
    browser.call("Network.setCacheDisabled", cacheDisabled=True)
    handler = partial(_Quiet, directory=str(path.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/{path.name}", width=1280)
        browser.wait_for(f"bench.isQuiet({quiet_ms})")
        found = json.loads(browser.evaluate("bench.figures()"))
        server.shutdown()
    tasks = [(begin, length) for begin, length in found["tasks"] if begin + length > found["paint"]]
    opened = {
        "first paint": found["paint"],
        "loaded": found["loaded"],
        "interactive": max([found["paint"], found["loaded"], *(begin + length for begin, length in tasks)]),
        "blocked": sum(max(length - 50, 0) for _, length in tasks),
        "longest task": max((length for _, length in found["tasks"]), default=0),
        "nodes": found["nodes"],
    }
    if link_mbit:
        return opened
    browser.evaluate("bench.tasks.length = 0")
    return opened | {
        "all plots": browser.evaluate("bench.read()"),
        "longest task then": browser.evaluate("Math.max(0, ...bench.tasks.map(([, length]) => length))"),
        "nodes then": browser.evaluate("document.querySelectorAll('*').length"),
        "sort": browser.evaluate("bench.sort()"),
        "choose": browser.evaluate("bench.choose()"),
    }


def print_medians(link_mbit: int, samples: list[dict[str, float]]) -> None:
    """Print one line for a link."""
    link = f"{link_mbit} Mbit/s, {_SLOW_RTT_MS} ms" if link_mbit else "no limit"
    parts = [f"{name} {value:.0f}{'' if 'nodes' in name else ' ms'}" for name, value in medians(samples).items()]
    print(f"  {link}: {', '.join(parts)}", flush=True)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    main()
