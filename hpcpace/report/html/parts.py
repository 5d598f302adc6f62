"""What the parts of a step are called, and how every plot of the page draws them."""

from __future__ import annotations

from typing import Any

# (name, parts, colour, pattern): busy is blue, wait vermilion, transfer yellow; patterns tell equal hues apart.
PARTS = (
    ("data", ("data",), "@data", ""),
    ("forward", ("forward",), "@busy-1", ""),
    ("backward", ("backward",), "@busy-2", ""),
    ("optimizer", ("optimizer",), "@busy-3", ""),
    ("waiting for the host", ("host",), "@other", "/"),
    ("garbage collection", ("gc",), "@gc", ""),
    ("pacing", ("pace",), "@pace", ""),
    ("checkpoint, evaluation", ("checkpoint", "eval"), "@checkpoint", ""),
    ("gradient sync: wait", ("sync_wait",), "@wait", "/"),
    ("wait", ("wait",), "@wait", ""),
    ("gradient sync: transfer", ("sync_transfer",), "@transfer", "/"),
    ("transfer", ("transfer",), "@transfer", ""),
    ("other", ("other",), "@other", ""),
)


def marker(color: str, pattern: str, *, edge_px: int = 1) -> dict[str, Any]:
    """Return how plotly.js draws the bars of a part; `edge_px` is the gap between neighbours."""
    hatch = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.25}
    return {"color": color, "line": {"width": edge_px, "color": "@paper"}, "pattern": hatch}
