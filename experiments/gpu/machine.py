"""Versions, what NVML answers, and what the audit says of the machine."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from experiments.gpu.place import Place, answer
from hpcpace.audit.snapshot import read_nvml
from hpcpace.audit.tree import Unreadable
from hpcpace.metrics.kernels import library
from hpcpace.observe.collectives.switched import find_layer
from hpcpace.observe.host.counters import gpu_counters, gpu_in_use


def measure(place: Place) -> None:
    """Measure."""
    compiled = [name for name, found in (("layer", find_layer()), ("kernels", library())) if found is not None]
    nccl = "" if place.is_rehearsal else f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    place.note(
        versions=f"Python {platform.python_version()}, torch {torch.__version__}{nccl}, driver {_driver()}, "
        f"hpcpace {_installed()}; compiled: {' and '.join(compiled) or 'nothing'}"
    )
    place.note(nvml=_nvml(place))
    shown = place.hpcpace("audit", "--show", codes=(0, 1, 3, 4))
    found = json.loads(place.hpcpace("audit", "--json", codes=(0, 1, 3, 4), is_json=True))
    rules = ", ".join(sorted({f"{one['rule']} {one['status']}" for one in found["findings"]})) or "no findings"
    words = f"exit code {found['exit_code']}, {rules}"
    if place.is_rehearsal:
        place.note(audit=f"{words}; left out: a GPU in the picture")
    else:
        place.note(audit=answer("GPU0" in shown and not found["problems"], words))


def _driver() -> str:
    try:
        import pynvml
    except ImportError as error:
        return f"unknown ({error})"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    found = pynvml.nvmlSystemGetDriverVersion()
    return found.decode() if isinstance(found, bytes) else found


def _installed() -> str:
    try:
        return version("hpcpace")
    except PackageNotFoundError:
        return "not installed: the checkout is used"


def _nvml(place: Place) -> str:
    """Return how many of the audit's facts and of a rank's counters NVML knows."""
    try:
        facts = [asdict(one) for one in read_nvml(with_facts=True).facts.values()]
    except Unreadable as error:
        return f"left out: {error}" if place.is_rehearsal else f"NO: {error}"
    known = {name: value for name, value in facts[0].items() if value is not None}
    missing = ", ".join(sorted(facts[0].keys() - known.keys())) or "none"
    torch.ones(1, device="cuda")
    gpu, warnings = gpu_in_use(), list[str]()
    assert gpu is not None
    counters = gpu_counters(gpu, warnings.append)()
    place.note(nvml_facts=known, nvml_counters=counters)
    words = f"{len(known)} of {len(facts[0])} facts (missing: {missing}), counters {counters}"
    return answer(not warnings and counters[0] > 0 and counters[1] > 0, "; ".join([words, *warnings]))
