"""What the parts of a step are called, and how every plot of the page draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcpace.diagnosis.summary import WAIT_OR_TRANSFER

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
    ("gradient sync: wait or transfer", ("sync_either",), "@transfer", "/"),
    (WAIT_OR_TRANSFER, ("either",), "@transfer", ""),
    ("other", ("other",), "@other", ""),
)


_EITHER = {"transfer": "either", "sync_transfer": "sync_either"}


def drawn_parts(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the parts of a step as they are drawn: those without waits that are known have `either`."""
    names = {} if values["wait"] is not None else _EITHER
    return {names.get(name, name): value for name, value in values.items() if value is not None}


def drawn_names(parts: Sequence[str], *, are_waits_known: bool) -> tuple[str, ...]:
    """Return what parts of a lane are drawn as, as `drawn_parts` names them."""
    if are_waits_known:
        return tuple(parts)
    return tuple(_EITHER.get(name.replace("wait", "transfer"), name) for name in parts)


def marker(color: str, pattern: str, *, edge_px: int = 1) -> dict[str, Any]:
    """Return how plotly.js draws the bars of a part; `edge_px` is the gap between neighbours."""
    hatch = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "size": 7, "solidity": 0.25}
    return {"color": color, "line": {"width": edge_px, "color": "@paper"}, "pattern": hatch}
