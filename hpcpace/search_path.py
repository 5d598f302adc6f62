"""Keeps modules in the working folder, which may be a stranger's, from taking the place of installed ones."""

import os
import sys


def leave_out_working_folder() -> None:
    """Remove the working folder from where `python -m` looks first; with -P it is not there."""
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:  # it has been removed, and Python has left it out by itself
        return
    if sys.path[:1] == [here]:
        del sys.path[0]
