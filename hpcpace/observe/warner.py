"""Warnings of a session: on stderr, each of them once, without secrets."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpcpace.core.redaction import Redaction


class Warner:
    """Warns the user of this rank.

    Args:
        environ: names the secrets that messages must not show.

    Attributes:
        rank: this rank; None while unknown.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank: int | None = None
        self._environ = environ
        self._warned: set[str] = set()
        self._has_warned_for_all = False

    def warn(self, message: str) -> None:
        """Print a warning, unless it was printed before."""
        if message not in self._warned:
            self._warned.add(message)
            message = Redaction.of(self._environ, sys.argv).text(message)
            who = "" if self.rank is None else f"rank {self.rank}: "
            print(f"hpcpace: {who}warning: {message}", file=sys.stderr, flush=True)

    def tell(self, message: str) -> None:
        """Print what is no warning of hpcpace about itself, each time."""
        message = Redaction.of(self._environ, sys.argv).text(message)
        print(f"hpcpace: {message}", file=sys.stderr, flush=True)

    def warn_once_for_all(self, message: str) -> None:
        """Warn of what all ranks meet alike: only the first time, and only on ranks 0 and 1, as one may be dead."""
        if not self._has_warned_for_all and (self.rank is None or self.rank <= 1):
            self.warn(message)
        self._has_warned_for_all = True
