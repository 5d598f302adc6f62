"""Fill a folder with links to all commands of PATH but those of packages: a machine that lacks them.

python3 .ci/bare_path.py FOLDER [PACKAGE...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Make the links; of commands with one name the first on PATH counts, as in a shell."""
    folder, packages = Path(sys.argv[1]), sys.argv[2:]
    listed = ""
    if packages:
        listed = subprocess.run(["dpkg", "--listfiles", *packages], capture_output=True, text=True, check=True).stdout
    left_out = {os.path.realpath(line) for line in listed.splitlines() if os.path.isfile(line)}
    for path in os.environ["PATH"].split(os.pathsep):
        for command in sorted(Path(path).iterdir()) if os.path.isdir(path) else ():
            link = folder / command.name
            if not link.is_symlink() and os.path.realpath(command) not in left_out:
                link.symlink_to(command.absolute())


main()
