"""hpcpace traces, explains and paces distributed training on Slurm clusters.

The public interface is `hpcpace.session`; everything else is reached through the `hpcpace` command. Importing this
package loads neither torch nor MPI.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would load typing in every process of a traced job
if TYPE_CHECKING:
    from typing import Any

    from hpcpace.observe.session import Session

    session = Session

__all__ = ["Session", "__version__", "session"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Session", "session"):
        from hpcpace.observe.session import Session
        from hpcpace.pace.job import open_pacing

        Session.open_pacing = open_pacing
        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
