"""Runs `hpcpace` or a script in a process that tells what it did to files, programs and the network.

Python tells each such call to an audit hook (PEP 578), also those with a descriptor in place of a path.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

_TOLD = (
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pickle.find_class",
    "shutil.",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendto",
    "subprocess.Popen",
    "webbrowser.open",
    "ctypes.dlopen",
)


def main(log: str, *argv: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif not event.startswith(_TOLD):
            return
        os.write(descriptor, json.dumps([event, *map(str, arguments)]).encode() + b"\n")

    sys.argv = list(argv)
    sys.addaudithook(told)
    if argv[0] == "hpcpace":
        runpy.run_module("hpcpace", run_name="__main__")
    else:
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
