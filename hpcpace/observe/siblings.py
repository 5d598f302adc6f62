"""The ranks that the same launcher has started on this host."""

from __future__ import annotations

from contextlib import suppress

import psutil


def wake_siblings() -> None:
    """Let ranks on this host that a signal has stopped go on, so that their launcher can end them.

    A launcher that ends its ranks by SIGTERM waits for one that is stopped for ever. Only processes with the parent and
    the command line of this one are ranks; others may have been stopped for good reasons.
    """
    with suppress(psutil.Error):
        own = psutil.Process()
        parent, command = own.parent(), own.cmdline()
        for sibling in parent.children() if parent is not None else ():
            with suppress(psutil.Error):
                if sibling.status() == psutil.STATUS_STOPPED and sibling.cmdline() == command:
                    sibling.resume()
