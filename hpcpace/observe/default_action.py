"""What a signal does by default, where a handler of ours has it that no longer serves anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def act_by_default(number: int, handler: Callable[..., Any]) -> None:
    """Do what a signal does by default if it still comes to a handler, which is over.

    A script may keep a handler of ours as the one before its own, and put it back after we have removed it. Where the
    handler of the script only calls ours, nothing is done: without us, it would have had none to call.
    """
    if signal.getsignal(number) == handler:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
