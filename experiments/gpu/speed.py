"""Tokens a second and the use of the peak (MFU) beside other GPT-2s."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from experiments.gpu.place import Place

_RATE = re.compile(r"^  (\S+) +([\d.]+) tokens/s", re.MULTILINE)
_MFU = re.compile(r"MFU at a peak of .*")


def measure(place: Place) -> None:
    """Measure."""
    missing = [name for name in ("transformers", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        words = f"left out: {' and '.join(missing)} not installed (the extra bench)"
        place.note(tokens=words, mfu=words)
        return
    checkout = Path(os.environ.get("NANOGPT", "build/nanoGPT"))
    nanogpt = ("--nanogpt", checkout) if (checkout / "model.py").is_file() else ()
    found = place.bench(
        *("tokens", "--device", place.device, "--dtype", place.choose("bf16", "float32")),
        *("--preset", place.choose("small", "tiny"), "--seq-len", place.choose(1024, 64)),
        *("--batch-size", place.choose(12, 1), "--block-steps", place.choose(8, 2), "--pairs", place.choose(8, 2)),
        *nanogpt,
    )
    rates = ", ".join(f"{name} {float(rate):,.0f}" for name, rate in _RATE.findall(found))
    place.note(tokens=rates if nanogpt else f"{rates}; no checkout of nanoGPT in {checkout}")
    share = _MFU.search(found)
    place.note(mfu=share[0] if share else f"left out: no peak is known of {'CPUs' if place.is_rehearsal else 'it'}")
