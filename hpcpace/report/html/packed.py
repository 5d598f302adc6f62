"""What the page carries compressed: plotly.js, and the contents of summary.json for download.

The page unpacks both by itself, with fflate, so that it is small to copy and opens before plotly.js is unpacked.
Browsers can unpack, too (`DecompressionStream`), but not at once, and printing does not wait. The plotly.js in the
package is the bundle of cartesian plots, which has all that the page draws.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from importlib.resources import files

_ASSETS = files("hpcpace.report.html").joinpath("assets")
_BUNDLE = "plotly-cartesian.min.js.gz"
_LEVEL = 6


def asset(name: str) -> str:
    """Return a text file of the page."""
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")


def plot_library() -> bytes:
    """Return plotly.js as gzip: the bundle of this package."""
    return _ASSETS.joinpath(_BUNDLE).read_bytes()


def compressed(text: str) -> bytes:
    """Return a text as gzip; the same text gives the same bytes."""
    return gzip.compress(text.encode(), _LEVEL, mtime=0)


def unpacked(data: bytes) -> bytes:
    """Return what was compressed."""
    return gzip.decompress(data)


def embedded(data: bytes) -> str:
    """Return compressed data as the page has it between tags."""
    return base64.b64encode(data).decode()


def script_hash(code: bytes) -> str:
    """Return what a content security policy allows this script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code).digest()).decode()}'"
