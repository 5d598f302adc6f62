"""What MkDocs needs beyond mkdocs.yml: pages that are not in this folder, and the links from and to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "documents.md": "docs/README.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "analysis.md": "analysis/README.md",
}
"""The pages of the site that come from elsewhere, and from which file of the repository."""
_PLACES = {path: page for page, path in PAGES.items()}
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^):#\s]+)(#[^)]*)?\)")
API = """# Python

`hpcpace.session` is the class below; [Attaching](attach.md) has examples.

::: hpcpace.observe.session.Session

## Runs as data
[Runs in Python](python.md) is the guide, [frames.md](frames.md) has all columns.

::: hpcpace.frames.run.load
::: hpcpace.frames.run.Run
::: hpcpace.frames.run.load_many

## Callbacks
::: hpcpace.callbacks.lightning
::: hpcpace.callbacks.transformers
::: hpcpace.callbacks.accelerate
::: hpcpace.callbacks.deepspeed
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, and the one of the Python interface; the first page is that of the repository."""
    files.remove(files.src_uris["README.md"])
    for page, path in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=API))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page whose links lead to pages, with their names in place of files' names; others are text alone."""
    names = {
        file: name for part in config["nav"] for pages in part.values() for one in pages for name, file in one.items()
    }
    return _LINK.sub(lambda link: _linked(page.file.src_uri, names, *link.groups()), markdown)


def _linked(page: str, names: dict[str, str], text: str, target: str, anchor: str | None) -> str:
    folder = posixpath.dirname(PAGES.get(page, f"docs/{page}"))
    path = posixpath.normpath(posixpath.join(folder, target))
    place = _PLACES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not place:
        return text
    shown = names.get(place, text) if text.endswith(".md") else text
    return f"[{shown}]({posixpath.relpath(place, posixpath.dirname(page))}{anchor or ''})"
