"""Keeps the frames of hpcpace out of the tracebacks of somebody else's script."""

from __future__ import annotations


def leave_out_own_frame(error: BaseException) -> None:
    """Take the frame that has caught an error out of its traceback; `raise` without an argument adds none again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
