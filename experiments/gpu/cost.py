"""What tracing costs, by the benchmarks that measure it on CPUs, too."""

from __future__ import annotations

import re

from experiments.gpu.place import Place

_NUM_PAIRS = 10
"""Of blocks, which take turns."""
_SETTLE_S = 1.1
"""Marks of a session are not read before a second has passed (hpcpace.observe.device.clock)."""
_ADDED = re.compile(r"step time (.+?) of ([\d.]+) ms, (.+?) (\S+ % \[.+?\])")


def measure(place: Place) -> None:
    """Measure."""
    few = place.choose(20, 4)
    marks = place.bench("device_marks", "--rounds", few)
    place.note(mark=_after(marks, "a mark, read later: "))
    calls = place.bench("collective", "--on-device", "--rounds", few, "--calls", place.choose(500, 100))
    place.note(collective=_after(calls, "observed as on a device: "))
    for name, step_ms, preset, seq_len in (("short", 10, "tiny", 128), ("long", 100, "small", 1024)):
        # A rehearsal has the same model twice.
        preset, seq_len = place.choose((preset, seq_len), ("tiny", 64))
        found = place.bench(
            *("overhead", "--device", place.device, "--ranks", 1, "--dtype", place.choose("bf16", "float32")),
            *("--preset", preset, "--seq-len", seq_len, "--step-ms", step_ms),
            *("--block-steps", max(place.choose(300, 60) // step_ms, 1), "--pairs", place.choose(_NUM_PAIRS, 2)),
            *("--settle-steps", place.choose(int(_SETTLE_S * 1000 / step_ms), 1)),
        )
        added = _ADDED.search(found)
        assert added is not None, "the benchmark printed no figures"
        place.note(**{name: f"{added[1]} of {added[2]} ms; {added[3]} {added[4]}"})


def _after(text: str, words: str) -> str:
    """Return the rest of the lines that begin with some words."""
    return "; ".join(line.strip().removeprefix(words) for line in text.splitlines() if line.strip().startswith(words))
