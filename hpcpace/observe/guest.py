"""How to behave in somebody else's process: warn once, undo replacements, hide own frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

from hpcpace.core.redaction import Redaction


class Replacements(ExitStack):
    """Functions that are replaced until it closes; it can be filled again after that.

    Where somebody else has put a function of theirs on top of ours since, both stay. Filled again, it leaves them so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: set[tuple[int, str]] = set()

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function of a module, class or object by what `wrap` makes of it."""
        if (id(owner), name) not in self._left:
            replace(self, owner, name, wrap, left=self._left)


def replace(
    cleanup: ExitStack,
    owner: Any,
    name: str,
    wrap: Callable[[Any], Any],
    *,
    left: set[tuple[int, str]] | None = None,
) -> None:
    """Replace a function of a module, class or object by what `wrap` makes of it, until the stack closes.

    Args:
        cleanup: the stack.
        owner: the module, class or object.
        name: of the function in it.
        wrap: takes the function.
        left: gets identity of owner and name, where the function stays because another one is on top of it.
    """
    original = getattr(owner, name)
    is_own = name in vars(owner)
    made = wraps(original)(wrap(original))
    setattr(owner, name, made)

    def restore() -> None:
        if vars(owner).get(name) is not made:
            if left is not None:
                left.add((id(owner), name))
        # A wrapper on an object hides its class's method: it is deleted, so that the object holds no trace of us.
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    cleanup.callback(restore)


def leave_out_own_frames(error: BaseException) -> None:
    """Take the frames of hpcpace that have passed an error on out of its traceback, as far as they are the outermost.

    `raise` without an argument adds none again.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("hpcpace."):
        trace = trace.tb_next
    error.__traceback__ = trace


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
