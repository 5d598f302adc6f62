"""GPT-2 in a world of one, as `hpcpace train` trains it: speed, times on the device, and what the report says."""

from __future__ import annotations

import json

import numpy as np

from experiments.gpu.place import Place, answer, device_share, traces_of, verdict_words
from hpcpace.core.rundir import open_run

_WARMUP = 3


def measure(place: Place) -> None:
    """Measure."""
    run = place.folder / "run"
    num_steps = place.choose(100, 30)
    place.hpcpace(
        *(
            "train",
            "gpt2",
            "--device",
            place.device,
            "--backend",
            place.backend,
            "--dtype",
            place.choose("bf16", "float32"),
        ),
        *("--preset", place.choose("small", "tiny"), "--batch-size", place.choose(12, 2)),
        *("--seq-len", place.choose(1024, 32), "--steps", num_steps, "--run-dir", run, "--progress", "off"),
    )
    result = json.loads(open_run(run).last_attempt().result_json.read_text())
    traces = traces_of(run)
    steps = traces[0].tables["steps"]
    step_ms = np.median((steps["end_ns"] - steps["begin_ns"])[_WARMUP:]) / 1e6
    place.note(
        training=f"{result['samples_per_s']:,.0f} {result['samples_unit']}/s, steps of {step_ms:.1f} ms, loss "
        f"{result['losses'][0]:.2f} to {result['losses'][-1]:.2f}, {len(steps)} of {num_steps} steps traced"
    )
    place.note(device_times=device_share(traces))
    summary = place.report(run)
    place.note(verdict=answer(not summary["verdict"]["culprits"], verdict_words(summary)), shares=summary["shares"])
