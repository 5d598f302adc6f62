"""Four ranks on one GPU over gloo: what their reports say without a fault, with one, and with foreign kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from experiments.gpu.place import JOB, Place, answer, device_share, traces_of, verdict_words

_SLOW_RANK = 2


def measure(place: Place) -> None:
    """Measure."""
    for name in ("sound", "work", "foreign"):
        run = place.folder / name
        work = ("--work", _SLOW_RANK, "--extra", place.choose(2, 8)) if name == "work" else ()
        with _foreign_kernels(place, is_wanted=name == "foreign"):
            place.job(run, *_size(place), *work, ranks=4)
        if name == "sound":
            place.note(device_times=device_share(traces_of(run)))
        summary = place.report(run)
        ranks = [one["id"] for one in summary["verdict"]["culprits"] if one["kind"] == "rank"]
        is_right = not summary["verdict"]["culprits"]
        if name == "work":
            is_right = ranks == [str(_SLOW_RANK)] and "by computation" in summary["verdict"]["headline"]
        place.note(**{name: answer(is_right, verdict_words(summary))})


def _size(place: Place) -> tuple[object, ...]:
    # Gradients go over the host: few of them, and much work on each.
    return (
        *("--steps", place.choose(50, 30), "--width", place.choose(1024, 192)),
        *("--layers", place.choose(6, 3), "--rows", place.choose(8192, 512)),
    )


@contextmanager
def _foreign_kernels(place: Place, *, is_wanted: bool) -> Iterator[None]:
    """Let another process multiply on the same device while the block runs."""
    if not is_wanted:
        yield
        return
    command = [sys.executable, str(JOB), "--foreign", "--device", place.device, "--width", str(place.choose(4096, 512))]
    with subprocess.Popen(command) as foreign:
        try:
            yield
        finally:
            foreign.kill()
