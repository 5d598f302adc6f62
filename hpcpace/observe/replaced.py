"""Functions of torch replaced by observing ones while a session records, and put back after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


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
