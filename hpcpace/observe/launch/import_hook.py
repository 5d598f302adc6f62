"""Waits for torch in a process of a traced job, and costs nothing where it does not come.

Most processes that a job starts are compilers, git, or workers that never train. This module imports nothing that
Python has not imported already; everything else of hpcpace loads once torch does.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

WATCHED = ("torch.distributed.distributed_c10d", "torch", "hpcpace.observe.session")
"""The modules whose import is noted: the first before others take its functions by name, the second when torch is
complete, the third for sessions of the script's own."""


def arm() -> None:
    """Follow this process from the import of torch on."""
    sys.meta_path.insert(0, ImportWatch(_OnImport(), list(sys.path)))


class ImportWatch:
    """A finder that finds nothing itself, but calls back as soon as a watched module has been executed.

    Args:
        seen: called with each watched module.
        search_path: where what `seen` imports is looked for. The folder of a script comes onto the search path later:
            its modules are the script's, and may have the names of packages that hpcpace imports.
    """

    def __init__(self, seen: Callable[[Any], None], search_path: list[str]) -> None:
        self._seen = seen
        self._search_path = search_path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find."""
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            spec: ModuleSpec | None = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            del loader.exec_module  # the method of its class is in force again
            try:
                execute(module)
            except BaseException as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
                raise
            self._call_back(module)

        loader.exec_module = exec_module

    def _call_back(self, module: Any) -> None:
        current = sys.path[:]
        sys.path[:] = self._search_path
        try:
            self._seen(module)
        except Exception:  # such as a Python in which a package is missing: its job goes on untraced
            pass
        finally:
            sys.path[:] = current


class _OnImport:
    """Makes a follower of this process for the first watched module, and hands it all of them."""

    def __init__(self) -> None:
        self._follower: Any = None

    def __call__(self, module: Any) -> None:
        from hpcpace.observe.launch.follower import find_follower

        if self._follower is None:
            self._follower = find_follower()
        if self._follower is not None:
            self._follower.follow(module)
