"""What is bound to a release or a compiler: what is private to other libraries, and libraries compiled from C++.

Each function says with which releases it was tried, and what happens without it. Private functions of torch that are
replaced by observing ones (`torch.autograd._engine_run_backward`, `Optimizer._optimizer_step_code`,
`ProcessGroup._start_coalescing`) are named where that happens: they are looked up by name, and what a release does not
have is not observed. Torch loads when a function needs it.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_DYNAMO = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_REMEMBERED = "unpatched_nn_module_call"
_PACKAGE = "hpcpace."
# The models of `hpcpace train` are a job like any other.
_JOBS = "hpcpace.train."

# Of the standard library: the unpickler in Python, which can be made to refuse. Tried with Python 3.11 and 3.12;
# without it no dump of NCCL's flight recorder that is a pickle can be read.
PythonUnpickler = pickle._Unpickler


@cache
def hdf5_library() -> ctypes.CDLL:
    """Return HDF5 itself, for the few calls that h5py does not wrap.

    It is found through a module of h5py that is linked to it. Tried with h5py 3.16; without it no trace can be
    read, as nothing else says how large attributes and filters are before they are read.
    """
    import h5py

    return ctypes.CDLL(h5py.h5p.__file__)


def c10d() -> Any:
    """Return torch's process groups and their options below the dispatcher, where nothing observes them.

    Tried with torch 2.11 and 2.13; without it a session over torch warns and records nothing, and no probe runs.
    """
    return import_module("torch._C._distributed_c10d")


def default_store() -> Any:
    """Return the store of torch's default group.

    Tried with torch 2.11 and 2.13; without it a session over torch warns and records nothing.
    """
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def set_group_timeout(timeout: Any) -> None:
    """Give the collectives of torch's default group another timeout.

    Tried with torch 2.11, 2.13 and 2.14; without it `hpcpace train` ends at its start.
    """
    import torch.distributed as dist

    # Public since torch 2.14, where the private one warns.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout)


def host_backend(process_group: Any) -> Any:
    """Return what carries a group's operations on the CPU, below torch's dispatcher.

    Tried with torch 2.11 and 2.13; without it `hpcpace train` ends at its start.
    """
    import torch

    return process_group._get_backend(torch.device("cpu"))


@cache
def dispatch_key() -> Any:
    """Return the keys of torch's dispatcher.

    Tried with torch 2.11 and 2.13; without them the session warns and records nothing.
    """
    import torch

    return torch._C.DispatchKey


def keep_uncompiled() -> None:
    """Mark all code of hpcpace that is loaded as not to be compiled, but that of its own workloads.

    Dynamo looks at every Python frame that runs below a compiled function after a graph break, ours included: it would
    compile the observer and warn of its recompilations, and a failure on one rank alone would shift every later match.
    Torch marks its own code so, frame by frame, so that what a frame calls is still considered; the same mark on ours
    changes nothing for the job. It is set in C, without loading Dynamo, which takes seconds. Code that is loaded later
    is not reached by the frames of a job. Tried with torch 2.11 and 2.13; without it our frames are compiled.
    """
    skip = _skip_of_torch()
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and not name.startswith(_JOBS):
            for owned in list(vars(module).values()):
                for code in _codes(owned, name):
                    skip(code)


def _skip_of_torch() -> Callable[[CodeType], Any] | None:
    """Return the function that marks code; None if this release has it elsewhere."""
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    try:
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        mark = frames.set_code_exec_strategy
    except AttributeError:
        return getattr(frames, "skip_code", None)
    return lambda code: mark(code, strategy)


def _codes(owned: Any, module: str) -> Iterator[CodeType]:
    """Yield the code of a function or of a class's methods, and of all functions inside them."""
    if isinstance(owned, FunctionType):
        # Decorated functions run a frame of contextlib or functools, and then ours.
        inner = getattr(owned, "__wrapped__", None)
        yield from _with_inner(owned.__code__)
        if inner is not None:
            yield from _codes(inner, module)
    elif isinstance(owned, type) and owned.__module__ == module:
        for attribute in list(vars(owned).values()):
            for part in ("fget", "__func__", "func"):
                attribute = getattr(attribute, part, attribute)
            yield from _codes(attribute, module)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def tell_dynamo(old: Any, new: Any) -> None:
    """Replace what Dynamo remembers as the call of modules whose frames it may skip; it may be loaded later as well.

    Tried with torch 2.11 and 2.13; without it Dynamo breaks its graphs at each module.
    """
    for name in _DYNAMO:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _REMEMBERED, None) is old:
            setattr(module, _REMEMBERED, new)


def backend_name(process_group: Any) -> str:
    """Return the backend of a process group as torch's registry has it; `unknown` for a group made without it.

    Tried with torch 2.11 and 2.13; without the registry operations cannot be recorded, of which the session warns.
    """
    import torch.distributed as dist

    is_registered = process_group in dist.distributed_c10d._world.pg_map
    return str(dist.get_backend(process_group)) if is_registered else "unknown"


def device_backend(process_group: Any) -> str:
    """Return the name of a group's backend for tensors on a GPU; empty where it has none, or is of another maker.

    Tried with torch 2.11 and 2.13; without it operations on a GPU count as those of NCCL.
    """
    import torch

    try:
        name: str = process_group._get_backend(torch.device("cuda")).name()
    except (RuntimeError, AttributeError):
        return ""
    return name


def has_context(device: int) -> bool:
    """Return whether this process has a CUDA context on a device; where a release cannot say, it has.

    Read in torch 2.11 to 2.13, and not tried on a GPU yet.
    """
    import torch

    has_primary = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_primary is None or bool(has_primary(device))


def stream_reader() -> Callable[[int], int]:
    """Return the function that returns the number of the current stream of a device.

    Read in torch 2.11 to 2.13, and not tried on a GPU yet; without it the session warns and records nothing.
    """
    import torch

    reader: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return reader


def loader_iterator() -> type:
    """Return the base class of the iterators of torch's DataLoader.

    Tried with torch 2.11 and 2.13; without it the session warns and records nothing.
    """
    import torch

    iterator: type = torch.utils.data.dataloader._BaseDataLoaderIter
    return iterator


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Have a function called after the backward pass that is running, before those that are queued later.

    Tried with torch 2.11 and 2.13; without it the wait for gradients is part of the backward pass.
    """
    import torch

    with suppress(AttributeError):
        torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Return whether a backward pass runs what this thread does; those of devices have threads of their own.

    Tried with torch 2.11 and 2.13; without it a backward pass inside another one of a device counts as one by itself.
    """
    import torch

    find: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return find is not None and find() >= 0


def source_rank(work: Any) -> int:
    """Return the rank in its group from which a receive of any source has received.

    Tried with torch 2.11 and 2.13; without it the rank is -1, which is unknown.
    """
    rank: int = work._source_rank() if hasattr(work, "_source_rank") else -1
    return rank


def load_compiled(source: Path) -> ctypes.CDLL | None:
    """Return the library of a source, from the same folder; None if there is none of this source."""
    for path in sorted(source.parent.glob(f"_{source.stem}*.so")):
        try:
            found = ctypes.CDLL(str(path))
            check = found.source_check
            check.restype = ctypes.c_uint32
            if check() == zlib.crc32(source.read_bytes()):
                return found
        except (OSError, AttributeError):
            continue
    return None
