"""How a command enters a lab: it replaces itself with a copy that starts in the lab's namespaces."""

from __future__ import annotations

import os
import sys

from hpcpace.cli.options import option
from hpcpace.config import LabConfig
from hpcpace.core.errors import UsageError
from hpcpace.lab.lab import Lab
from hpcpace.lab.namespaces import NAME_VARIABLE

name_option = option(
    "--name",
    metavar="NAME",
    envvar=NAME_VARIABLE,
    default=LabConfig().name,
    show_default=True,
    help="Use the lab of this name.",
)


def attach_inside(name: str) -> Lab:
    """Return the lab of this name, seen from inside: a command that runs outside restarts itself in there.

    Raises:
        UsageError: the user is not root, or no such lab is up.
    """
    if os.geteuid() != 0:
        raise UsageError(f"the lab needs root; this is user {os.geteuid()}: start it with sudo")
    lab = Lab.attach(name)
    if not lab.is_here:
        again = lab.command([sys.executable, "-P", "-m", "hpcpace", *sys.argv[1:]])
        os.execvpe(again[0], again, lab.environ())
    return lab
