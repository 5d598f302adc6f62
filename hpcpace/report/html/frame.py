"""The frame of every page: one file that opens without a network, with styles, scripts, plots and data to download.

Nothing in it can load anything: a content security policy allows only the scripts written here, by their hashes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from hpcpace.report.document import Plot
from hpcpace.report.html import _asset, compressed, embedded, plot_library, script_hash, unpacked
from hpcpace.report.html.text import escape

_SCRIPTS = ("base.js", "plots.js", "tables.js", "controls.js")


def framed(title: str, body: str, plots: Sequence[Plot], content: str) -> str:
    """Return a whole page.

    Args:
        title: of its window, as text.
        body: what is in it, as HTML.
        plots: those whose places are in the body.
        content: JSON that the button of `tools` saves.
    """
    library, inflate, script = plot_library(), _asset("fflate.umd.js"), _script()
    fields = {
        "TITLE": escape(title),
        "SCRIPTS": " ".join(script_hash(code) for code in (unpacked(library), inflate.encode(), script.encode())),
        "STYLE": _asset("page.css"),
        "DARK": _asset("dark.css"),
        "BODY": body,
        "DATA": _json({plot.name: _description(plot) for plot in plots}),
        "SUMMARY": embedded(compressed(content)),
        "LICENSES": "\n".join(_asset(f"{name}-LICENSE") for name in ("plotly", "fflate")),
        "LIBRARY": embedded(library),
        "INFLATE": inflate,
        "SCRIPT": script,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: fields[found[1]], _asset("page.html"))


def tools(file_name: str) -> str:
    """Return the buttons at the head of a page: save its content under a name, and choose light or dark."""
    return (
        f'<div class="tools" hidden><button type="button" id="save-summary" data-name="{file_name}">Save {file_name}'
        '</button><button type="button" id="theme"></button></div>'
    )


def _script() -> str:
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _description(plot: Plot) -> dict[str, object]:
    rows = {"rows": plot.rows} if plot.rows else {}
    return {"height": plot.height_px, "traces": plot.traces, "layout": plot.layout, **rows}


def _json(data: object) -> str:
    # No text in it may end the element that holds it.
    made = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
