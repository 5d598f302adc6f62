"""The same steps seen by torch.profiler, imported, and by hpcpace: how far phases and collectives are apart."""

from __future__ import annotations

import numpy as np

from experiments.gpu.place import Place, answer, traces_of, verdict_words
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import Phase

_NUM_STEPS, _NUM_BEFORE = 20, 20
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_MAX_DIFFERENCE = 0.05


def measure(place: Place) -> None:
    """Measure."""
    run, imported, profiles = (place.folder / name for name in ("run", "imported", "profiles"))
    profiles.mkdir()
    place.job(
        run,
        *("--backend", place.backend, "--profile", profiles, "--profiled-steps", _NUM_STEPS),
        *("--steps", _NUM_BEFORE + _NUM_STEPS, "--width", place.choose(4096, 512)),
        *("--layers", 8, "--rows", place.choose(4096, 256)),
    )
    place.hpcpace("import", "kineto", profiles, "--run-dir", imported, codes=(0, 1))
    (ours,), (theirs,) = traces_of(run), traces_of(imported)
    differences = {
        phase.name.lower(): _phase_ms(theirs, phase) / max(_phase_ms(ours, phase), 1e-9) - 1 for phase in _PHASES
    }
    place.note(
        phases=answer(
            all(abs(one) <= _MAX_DIFFERENCE for one in differences.values()),
            ", ".join(f"{name} {100 * one:+.1f} % in the profile" for name, one in differences.items()),
        )
    )
    place.note(collectives=_collectives(ours, theirs))
    place.note(imported=verdict_words(place.report(imported)))


def _phase_ms(trace: RankTrace, phase: Phase) -> float:
    """Return the length of a phase in the last steps, summed over each and averaged, on the device if it has times."""
    rows = trace.tables["phases"]
    rows = rows.select(rows["phase"] == phase)
    edge = "device_" if "device_end_ns" in rows and rows["device_end_ns"].any() else ""
    lengths_ns = rows[f"{edge}end_ns"] - rows[f"{edge}begin_ns"]
    steps = np.unique(rows["step"])[-_NUM_STEPS:]
    return float(lengths_ns[np.isin(rows["step"], steps)].sum()) / max(len(steps), 1) / 1e6


def _collectives(ours: RankTrace, theirs: RankTrace) -> str:
    """Compare the collectives of the steps that both have; of ours, those that were issued during the last steps."""
    steps = ours.tables["phases"]
    begin_ns = np.sort(steps["begin_ns"][steps["phase"] == Phase.FORWARD])[-_NUM_STEPS:][0]
    rows, others = ours.tables["collectives"], theirs.tables["collectives"]
    issued_ns = rows["enqueue_ns"] if "enqueue_ns" in rows else rows["enter_ns"]
    rows = rows.select(issued_ns >= begin_ns)
    if not len(others):
        return f"{len(rows)} in the trace, none in the profile: NCCL need launch no kernel in a world of one"
    lengths_us = [float(np.mean(one["exit_ns"] - one["enter_ns"])) / 1e3 if len(one) else 0.0 for one in (rows, others)]
    difference = lengths_us[1] / max(lengths_us[0], 1e-9) - 1
    return answer(
        len(rows) == len(others) and abs(difference) <= _MAX_DIFFERENCE,
        f"{len(others)} in the profile of {lengths_us[1]:.1f} us, {len(rows)} in the trace of {lengths_us[0]:.1f} us",
    )
