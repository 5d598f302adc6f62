"""hpcpace traces, explains and paces distributed training on Slurm clusters.

The public interface is `hpcpace.session`; everything else is reached through the `hpcpace` command. Importing this
package loads neither torch nor MPI.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpace.observe.session import Session, session

try:
    __version__ = version("hpcpace")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["Session", "__version__", "session"]


def __getattr__(name: str) -> Any:
    if name in ("Session", "session"):
        from hpcpace.observe import session as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
