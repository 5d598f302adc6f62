"""Observation of what a job does around its steps: checkpoints being written, batches of loaders that are not torch's.

Libraries are observed only if the job has loaded them itself, by name: to import one costs seconds, and may fail.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from hpcpace.observe.own_frames import leave_out_own_frame
from hpcpace.observe.replaced import Replacements
from hpcpace.trace.schema import Phase

_SAVING = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    # Also where a script has imported `save` by name before: it calls this one.
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("safetensors.torch", "save_file"),
)
# Iterators over batches: the method that returns the next one.
_LOADING = (("nvidia.dali.plugin.base_iterator", "_DaliBaseIterator.__next__"),)


class LoadedLibraries:
    """Records phases in functions of libraries, as soon as the job has loaded them.

    Args:
        timed: returns a function that records a phase around another function.
        cleanup: puts the functions back.
    """

    def __init__(self, timed: Callable[[Phase, Callable[..., Any]], Callable[..., Any]], cleanup: Replacements) -> None:
        self._timed, self._cleanup = timed, cleanup
        self._thread = threading.get_ident()
        self._missing = [(*place, Phase.CHECKPOINT) for place in _SAVING]
        self._missing += [(*place, Phase.DATA) for place in _LOADING]
        self._num_modules = 0

    def look(self) -> None:
        """Observe what has been loaded since the last call."""
        if not self._missing or len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        self._missing = [place for place in self._missing if not self._observe(*place)]

    def _observe(self, module_name: str, path: str, phase: Phase) -> bool:
        module = sys.modules.get(module_name)
        if module is None:
            return False
        owner: Any = module
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if callable(getattr(owner, name, None)):
            self._cleanup.replace(owner, name, lambda call: self._in_one_thread(phase, call))
        return True

    def _in_one_thread(self, phase: Phase, call: Callable[..., Any]) -> Callable[..., Any]:
        """Record only in the thread that trains: what is saved in the background takes no time from a step."""
        timed, this_thread = self._timed(phase, call), threading.get_ident

        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                return (timed if this_thread() == self._thread else call)(*args, **kwargs)
            except BaseException as error:
                leave_out_own_frame(error)
                raise

        return observed
