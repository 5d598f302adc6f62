"""What we use of torch that is private to it, in one place: another release may have it elsewhere.

Private functions that are replaced by observing ones are named where that happens; they are looked up by name, and what
a release does not have is not observed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

DISPATCH_KEY = torch._C.DispatchKey

_DYNAMO = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_REMEMBERED = "unpatched_nn_module_call"
_PACKAGE = "hpcpace."
# The models of `hpcpace train` are a job like any other.
_JOBS = "hpcpace.train."


def keep_uncompiled() -> None:
    """Mark all code of hpcpace that is loaded as not to be compiled, but that of its own workloads.

    Dynamo looks at every Python frame that runs below a compiled function after a graph break, ours included: it would
    compile the observer and warn of its recompilations, and a failure on one rank alone would shift every later match.
    Torch marks its own code so, frame by frame, so that what a frame calls is still considered; the same mark on ours
    changes nothing for the job. It is set in C, without loading Dynamo, which takes seconds. Code that is loaded later
    is not reached by the frames of a job.
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
    """Replace what Dynamo remembers as the call of modules whose frames it may skip; it may be loaded later as well."""
    for name in _DYNAMO:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _REMEMBERED, None) is old:
            setattr(module, _REMEMBERED, new)


def backend_name(process_group: Any) -> str:
    """Return the backend of a process group as torch's registry has it; `unknown` for a group made without it."""
    is_registered = process_group in dist.distributed_c10d._world.pg_map
    return str(dist.get_backend(process_group)) if is_registered else "unknown"


def device_backend(process_group: Any) -> str:
    """Return the name of a group's backend for tensors on a GPU; empty where it has none, or is of another maker."""
    try:
        name: str = process_group._get_backend(torch.device("cuda")).name()
    except (RuntimeError, AttributeError):
        return ""
    return name


def has_context(device: int) -> bool:
    """Return whether this process has a CUDA context on a device; where a release cannot say, it has."""
    has_primary = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_primary is None or bool(has_primary(device))


def stream_reader() -> Callable[[int], int]:
    """Return the function that returns the number of the current stream of a device."""
    reader: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return reader


def loader_iterator() -> type:
    """Return the base class of the iterators of torch's DataLoader."""
    iterator: type = torch.utils.data.dataloader._BaseDataLoaderIter
    return iterator


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Have a function called after the backward pass that is running, before those that are queued later."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def source_rank(work: Any) -> int:
    """Return the rank in its group from which a receive of any source has received."""
    rank: int = work._source_rank()
    return rank
