"""What names in profiles mean: annotations that are phases, calls and kernels that are collectives."""

from __future__ import annotations

import re

from hpcpace.trace.schema import Op, Phase

OPS = {
    "allreduce": Op.ALL_REDUCE,
    "allgather": Op.ALL_GATHER,
    "allgatherintotensor": Op.ALL_GATHER,
    "reducescatter": Op.REDUCE_SCATTER,
    "reducescattertensor": Op.REDUCE_SCATTER,
    "broadcast": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "alltoallv": Op.ALL_TO_ALL,
    "send": Op.SEND,
    "recv": Op.RECV,
    "recvanysource": Op.RECV,
    "barrier": Op.BARRIER,
    "allreducebarrier": Op.BARRIER,
    "monitoredbarrier": Op.BARRIER,
}
"""Names of collectives without underscores, and without what says how they were called: `_base`, `_coalesced`, ..."""

_WAYS_OF_CALLING = ("base", "oop", "coalesced", "single")

_PHASES = (
    (re.compile(r"Optimizer\.step#|(^|\W)optimizer(\W|$)", re.IGNORECASE), Phase.OPTIMIZER),
    (re.compile(r"dataloader|(^|\W)data(\W|$)", re.IGNORECASE), Phase.DATA),
    (re.compile(r"(^|\W)forward(\W|$)", re.IGNORECASE), Phase.FORWARD),
    (re.compile(r"(^|\W)backward(\W|$)", re.IGNORECASE), Phase.BACKWARD),
)
_NOT_A_PHASE = re.compile(r"zero_grad|^nn\.Module|autograd::")


def phase_of(name: str) -> Phase | None:
    """Return the phase that an annotation's name says; None for any other name."""
    if name.startswith("nccl:") or _NOT_A_PHASE.search(name):
        return None
    return next((phase for pattern, phase in _PHASES if pattern.search(name)), None)


def op_of(name: str) -> Op | None:
    """Return the operation that a name like `all_reduce`, `allreduce` or `_allgather_base` means; None if none."""
    bare = name.lower().replace("_", "")
    for way in _WAYS_OF_CALLING:
        bare = bare.removesuffix(way)
    return OPS.get(bare)


def kernel_op(name: str) -> str:
    """Return what a kernel of NCCL does: the word behind the first underscore, as in `ncclDevKernel_AllReduce_Sum_f32`.

    Of a batch of messages, `SendRecv`, no name says the direction: it counts as a send.
    """
    word = name.partition("_")[2].partition("_")[0].partition("(")[0]
    return "send" if word == "SendRecv" else word
