"""The steps of first light in their order: what each answers, and how long it may take.

Its cells are the figures that the page shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOTAL_S = 540
"""Limit of all together: less than the time for which a machine with a GPU may be lent."""
SETUP_S = 60
"""Limit of the installation, which first_light.sh keeps to."""
REHEARSAL_FACTOR = 8
"""How much longer a step may take in a rehearsal: four ranks may share two cores, and these with others."""


def limits(arguments: Sequence[str]) -> tuple[int, int]:
    """Return the seconds that all may take, and those that the installation may take of them."""
    factor = REHEARSAL_FACTOR if "--rehearse" in arguments else 1
    return factor * TOTAL_S, factor * SETUP_S


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step.

    Attributes:
        name: short name, for `--only`, and of its files.
        measure: what measures it, in `experiments.gpu.measures.MEASURES`.
        title: what it does.
        limit_s: seconds after which all its processes are killed.
        cells: questions by the name of the figure that answers them.
    """

    name: str
    measure: str
    title: str
    limit_s: int
    cells: Mapping[str, str]


def _step(name: str, measure: str, limit_s: int, title: str, **cells: str) -> Step:
    return Step(name=name, measure=measure, title=title, limit_s=limit_s, cells=cells)


_MARKS = "How many marks have times on the device?"
STEPS = (
    _step(
        *("a", "machine", 20, "versions, NVML, audit"),
        versions="What is installed, and what is compiled?",
        nvml="What does NVML answer?",
        audit="Does `hpcpace audit` end well and show the GPU?",
    ),
    _step("b", "suite", 90, "the tests of `make gpu`", tests="How many pass?", failed="Which do not?"),
    _step(
        *("c", "alone", 35, "GPT-2 small in bf16, 100 steps in a world of one over NCCL, traced"),
        training="How fast does it train?",
        device_times=_MARKS,
        verdict="What does the report say?",
    ),
    _step(
        *("d", "shared", 75, "four ranks on one GPU over gloo: sound, more work on rank 2, foreign kernels"),
        device_times=_MARKS,
        sound="Sound: is nobody blamed?",
        work="More work on rank 2: is rank 2 alone named, by its computation?",
        foreign="Kernels of another process: is nobody blamed?",
    ),
    _step(
        *("e", "profiled", 35, "20 steps seen by torch.profiler and by hpcpace"),
        phases="Do phases agree within 5 %?",
        collectives="Do collectives agree within 5 %?",
        imported="What does the report of the imported profile say?",
    ),
    _step(
        *("f", "cost", 105, "what tracing costs: 20 blocks, on and off in turn"),
        mark="What does a mark cost?",
        collective="What does an observed collective cost?",
        short="What does tracing add to steps of 10 ms?",
        long="What does tracing add to steps of 100 ms?",
    ),
    _step(
        *("g", "speed", 40, "GPT-2 small beside transformers and nanoGPT"),
        tokens="How many tokens a second?",
        mfu="Which share of the peak (MFU)?",
    ),
    _step(
        *("h", "hangs", 45, "hangs: a rank that never calls, and a dump that NCCL writes"),
        absent="Is the rank that never calls named?",
        stopped="Does `--on-hang stop` end the job?",
        dump="Does NCCL write a dump, and what does `hpcpace hang` say of it?",
    ),
    _step(
        *("i", "habits", 35, "tiny kernels, FSDP2 of one rank and of two, lower clocks"),
        host_bound="Tiny kernels: is the job called host-bound?",
        sharded="FSDP2: are its steps and collectives recorded, and do all end?",
        clocks="Lower clocks: are they in the trace?",
    ),
)
