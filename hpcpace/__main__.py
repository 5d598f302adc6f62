"""`python -m hpcpace`: the same as the `hpcpace` command, for launchers that start modules."""

import os
import sys


def _leave_out_working_folder() -> None:
    """Remove the working folder from where `python -m` looks first, as a stranger may have put modules there.

    With -P, Python does not look there.
    """
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:  # it has been removed, and Python has left it out by itself
        return
    if sys.path[:1] == [here]:
        del sys.path[0]


if __name__ == "__main__":
    _leave_out_working_folder()

    from hpcpace.cli import main

    main()
