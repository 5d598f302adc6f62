"""hpcpace traces, explains and paces distributed training on Slurm clusters.

The public interface is `hpcpace.session` in a training script, and `hpcpace.load`, `hpcpace.load_many` and
`hpcpace.plots` for runs (docs/python.md); everything else is reached through the `hpcpace` command. Importing this
package loads neither torch nor MPI, and nothing that reads runs.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would load typing in every process of a traced job
if TYPE_CHECKING:
    from typing import Any

    from hpcpace import plots
    from hpcpace.frames.run import Run, load, load_many
    from hpcpace.observe.session import Session

    session = Session

__all__ = ["Run", "Session", "__version__", "load", "load_many", "plots", "session"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Session", "session"):
        from hpcpace.metrics.phases import parts_of_steps
        from hpcpace.observe.session import Session
        from hpcpace.pace.job import open_pacing

        Session.open_pacing, Session.measure_parts = open_pacing, parts_of_steps
        return Session
    if name in ("Run", "load"):
        from hpcpace.frames import run

        return getattr(run, name)
    if name == "load_many":
        from hpcpace.frames.run import load_many

        return load_many
    if name == "plots":
        from importlib import import_module

        return import_module("hpcpace.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
