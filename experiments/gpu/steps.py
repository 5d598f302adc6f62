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


STEPS = (
    Step(
        name="a",
        measure="machine",
        title="versions, NVML, audit",
        limit_s=20,
        cells={
            "versions": "What is installed, and what is compiled?",
            "nvml": "What does NVML answer?",
            "audit": "Does `hpcpace audit` end well and show the GPU?",
        },
    ),
    Step(
        name="b",
        measure="suite",
        title="the tests of `make gpu`",
        limit_s=90,
        cells={"tests": "How many pass?", "failed": "Which do not?"},
    ),
    Step(
        name="c",
        measure="alone",
        title="GPT-2 small in bf16, 100 steps in a world of one over NCCL, traced",
        limit_s=35,
        cells={
            "training": "How fast does it train?",
            "device_times": "How many marks have times on the device?",
            "verdict": "What does the report say?",
        },
    ),
    Step(
        name="d",
        measure="shared",
        title="four ranks on one GPU over gloo: sound, more work on rank 2, foreign kernels",
        limit_s=75,
        cells={
            "device_times": "How many marks have times on the device?",
            "sound": "Sound: is nobody blamed?",
            "work": "More work on rank 2: is rank 2 alone named, by its computation?",
            "foreign": "Kernels of another process: is nobody blamed?",
        },
    ),
    Step(
        name="e",
        measure="profiled",
        title="20 steps seen by torch.profiler and by hpcpace",
        limit_s=35,
        cells={
            "phases": "Do phases agree within 5 %?",
            "collectives": "Do collectives agree within 5 %?",
            "imported": "What does the report of the imported profile say?",
        },
    ),
    Step(
        name="f",
        measure="cost",
        title="what tracing costs: 20 blocks, on and off in turn",
        limit_s=105,
        cells={
            "mark": "What does a mark cost?",
            "collective": "What does an observed collective cost?",
            "short": "What does tracing add to steps of 10 ms?",
            "long": "What does tracing add to steps of 100 ms?",
        },
    ),
    Step(
        name="g",
        measure="speed",
        title="GPT-2 small beside transformers and nanoGPT",
        limit_s=40,
        cells={"tokens": "How many tokens a second?", "mfu": "Which share of the peak (MFU)?"},
    ),
    Step(
        name="h",
        measure="hangs",
        title="hangs: a rank that never calls, and a dump that NCCL writes",
        limit_s=45,
        cells={
            "absent": "Is the rank that never calls named?",
            "stopped": "Does `--on-hang stop` end the job?",
            "dump": "Does NCCL write a dump, and what does `hpcpace hang` say of it?",
        },
    ),
    Step(
        name="i",
        measure="habits",
        title="tiny kernels, FSDP2 of one rank and of two, lower clocks",
        limit_s=35,
        cells={
            "host_bound": "Tiny kernels: is the job called host-bound?",
            "sharded": "FSDP2: are its steps and collectives recorded, and do all end?",
            "clocks": "Lower clocks: are they in the trace?",
        },
    ),
)
