"""Jobs of one rank with habits of their own: tiny kernels, sharded parameters, and a GPU at a lower clock."""

from __future__ import annotations

from collections import Counter

import numpy as np

from experiments.gpu.place import Place, answer, traces_of, verdict_words
from hpcpace.trace.schema import ExitKind, Op

_LOW_MHZ = 600


def measure(place: Place) -> None:
    """Measure."""
    _tiny_kernels(place)
    _sharded(place)
    if place.is_rehearsal or not place.may_set_clocks:
        place.note(clocks=f"left out: {'it needs a GPU' if place.is_rehearsal else 'permitted by --clocks alone'}")
    else:
        _lower_clocks(place)


def _tiny_kernels(place: Place) -> None:
    run = place.folder / "tiny"
    sizes = ("--steps", 60, "--width", 16, "--layers", place.choose(200, 40), "--rows", 8)
    place.job(run, "--backend", place.backend, *sizes)
    summary = place.report(run)
    words = verdict_words(summary)
    is_right = summary["verdict"]["mode"] == "host-bound"
    place.note(host_bound=f"left out: devices; {words}" if place.is_rehearsal else answer(is_right, words))


def _sharded(place: Place) -> None:
    """Train with FSDP2 on one rank, for which torch communicates nothing, and on two over gloo."""
    num_steps, words, are_right = 30, [], []
    for ranks, backend in ((1, place.backend), (2, "gloo")):
        run = place.folder / f"sharded-{ranks}"
        sizes = ("--width", place.choose(2048, 64), "--layers", 4, "--rows", place.choose(2048, 16))
        place.job(run, "--backend", backend, "--shard", "--steps", num_steps, *sizes, ranks=ranks, codes=range(256))
        trace = traces_of(run)[0]
        rows, steps = trace.tables["collectives"], len(trace.tables["steps"])
        counts = Counter(Op(op).name.lower() for op in rows["op"].tolist())
        num_open = int((rows["exit_kind"] == ExitKind.NEVER).sum())
        found = ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"
        words.append(f"{ranks} over {backend}: {steps} of {num_steps} steps, {found}, {num_open} never ended")
        are_right.append(steps == num_steps and not num_open and bool(counts) == (ranks > 1))
    place.note(sharded=answer(all(are_right), "; ".join(words)))


def _lower_clocks(place: Place) -> None:
    run = place.folder / "clocks"
    try:
        place.run("nvidia-smi", "-lgc", f"{_LOW_MHZ},{_LOW_MHZ}")
    except (OSError, RuntimeError) as error:
        place.note(clocks=f"left out: {error}")
        return
    try:
        place.job(run, "--backend", place.backend, "--steps", 200, "--width", 4096, "--layers", 8, "--rows", 4096)
    finally:
        place.run("nvidia-smi", "-rgc")
    host = traces_of(run)[0].tables["host"]
    clock_mhz = float(np.median(host["gpu_clock_mhz"]))
    words = f"{clock_mhz:.0f} MHz where {_LOW_MHZ} were set; {verdict_words(place.report(run))}"
    place.note(clocks=answer(abs(clock_mhz / _LOW_MHZ - 1) < 0.1, words))
