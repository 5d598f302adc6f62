"""Functions of torch replaced by observing ones while a session records, and put back after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def replace(cleanup: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of a module, class or object by what `wrap` makes of it, until the stack closes."""
    original = getattr(owner, name)
    is_own = name in vars(owner)
    setattr(owner, name, wraps(original)(wrap(original)))
    # A wrapper on an object hides its class's method: it is deleted, so that the object holds no trace of us.
    if is_own:
        cleanup.callback(setattr, owner, name, original)
    else:
        cleanup.callback(delattr, owner, name)
