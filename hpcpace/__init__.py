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
__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Only now: `python -m hpcpace` gets here while Python still looks for modules in the working folder.
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("hpcpace")
        except PackageNotFoundError:  # running from a source tree that was never installed
            return "0+unknown"
    if name in ("Session", "session"):
        from hpcpace.observe.session import Session
        from hpcpace.pace.job import open_pacing

        Session.open_pacing = open_pacing
        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
