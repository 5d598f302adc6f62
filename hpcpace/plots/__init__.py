"""Plots of runs on axes of matplotlib: `hpcpace.plots.lateness(hpcpace.load(RUN))`; see docs/python.md."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcpace.plots.runs import lateness, parts, scaling, timeline

__all__ = ["lateness", "parts", "scaling", "timeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpcpace.plots import runs

    return getattr(runs, name)
