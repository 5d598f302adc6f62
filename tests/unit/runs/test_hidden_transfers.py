"""Communication that is hidden behind work: what reports know of it, and what larger sizes expose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import each_case
from probe_sample import made_probe

from experiments.scale_lab.overlap import Job
from experiments.score.layouts import MS, US, Layout
from hpcpace.report.document import Notes
from hpcpace.report.sections.history import scaling_document, scaling_headline
from hpcpace.runs.load import load_runs
from hpcpace.runs.scaling.result import scaling_of
from hpcpace.runs.scaling.samples import Sample

SIZES = (1, 2, 4, 8, 16)


def _hiding(seed: int, kind: str, used: float) -> tuple[Job, np.random.Generator]:
    """Return a job whose transfers on 16 nodes take a part of what can hide them, and grow with each hop."""
    random = np.random.default_rng([5, seed])
    num_layers = int(random.integers(8, 30))
    layer, volume = random.gamma(8.0, size=num_layers), random.gamma(4.0, size=num_layers)
    layer, volume = 9 * layer / layer.sum(), 4 * volume / volume.sum()
    hop = (used * 18 - 4) / num_layers / 15
    job = Job(kind=kind, layer=layer, volume=volume, hop=hop, inside=0, noise=0.01, tail=0, is_strong=False, growth=0.0)
    return job, random


@each_case(("kind", "seed", "used"), [("ddp", 0, 0.7), ("ddp", 1, 0.8), ("fsdp", 2, 0.7), ("fsdp", 3, 0.6)])
def test_transfers_that_are_hidden_today_are_exposed_on_more_nodes(kind: str, seed: int, used: float) -> None:
    job, random = _hiding(seed, kind, used)
    samples = [job.run(size, random) for size in SIZES]
    found, blind = scaling_of(samples), scaling_of([replace(one, overlap=None) for one in samples])
    truth_ns = 0.0
    for size in found.predictions:
        low, high = size.step_interval_ns
        truth_ns = job.run(size.num_units, random).step_ns or 0.0
        assert low <= truth_ns <= high and high < 1.6 * low
    assert truth_ns > 1.1 * blind.predictions[-1].step_ns  # which this is about
    assert found.knee is not None and found.knee.num_units is not None and not found.knee.is_measured
    shares = dict(found.knee.by_size)
    assert list(shares) == [*SIZES, 32] and shares[8] < 0.05 and shares[32] > 0.95
    assert list(shares.values()) == sorted(shares.values())


def test_microseconds_of_launching_on_one_node_do_not_hide_how_transfers_grow() -> None:
    job, random = _hiding(0, "ddp", 0.7)
    samples = [job.run(size, random) for size in SIZES]
    alone = [replace(row, transfer_ns=5_000.0, exposed_ns=0.0) for row in samples[1].overlap or ()]
    found = scaling_of([replace(samples[0], overlap=tuple(alone)), *samples[1:]])
    low, high = found.predictions[-1].step_interval_ns
    assert low <= (job.run(64, random).step_ns or 0.0) <= high < 1.6 * low
    assert found.knee is not None and found.knee.num_units is not None


def test_transfers_that_work_can_hide_on_all_sizes_stop_nothing() -> None:
    job, random = _hiding(4, "ddp", 0.23)
    found = scaling_of([job.run(size, random) for size in SIZES])
    low, high = found.predictions[-1].step_interval_ns
    assert low <= (job.run(64, random).step_ns or 0.0) <= high < 1.2 * low
    assert found.knee is not None and found.knee.num_units is None


def test_a_probe_counts_for_what_is_exposed_today_and_not_once_more_for_what_is_hidden() -> None:
    job, random = _hiding(0, "ddp", 6.0)
    calls = (("all_reduce", 4096.0, 1.0),)
    samples = [replace(job.run(size, random), calls=calls) for size in (1, 2, 4)]
    by_probe, without = (scaling_of(samples, probe=probe).predictions[-1] for probe in (made_probe(), None))
    assert by_probe.step_interval_ns[1] == pytest.approx(without.step_interval_ns[1], rel=0.1)


def _words(samples: list[Sample]) -> str:
    found = scaling_of(samples)
    notes = [
        note for section in scaling_document(found).sections for note in section.content if isinstance(note, Notes)
    ]
    return " ".join([dict(scaling_headline(found))["Knee"], *(str(line) for note in notes for line in note.lines)])


def test_what_cannot_be_seen_and_what_is_hidden_is_said() -> None:
    job, random = _hiding(0, "ddp", 0.7)
    samples = [job.run(size, random) for size in SIZES]
    said = _words(samples)
    assert "of transfers of the backward are hidden, at most 1" in said and "cannot be seen" not in said
    assert "probability that the knee is there or before: " in said and " % at 32 nodes" in said
    for blind in ([replace(one, overlap=None) for one in samples], [replace(one, parts_ns=None) for one in samples]):
        said = _words(blind)
        assert "communication hidden behind work cannot be seen in these runs, and may bring the knee forward" in said
        assert "what of it a larger size exposes is in no prediction" in said


@each_case(
    ("layout", "truth"),
    [
        (Layout(kind="ddp", transfer_ns=2_500 * US), {("backward", "all_reduce"): (20.0, 6.0, 14.0)}),
        (
            Layout(kind="fsdp"),
            {
                ("forward", "all_gather"): (2.4, 0.3, 8.0),
                ("backward", "all_gather"): (2.4, 0.3, 16.0),
                ("backward", "reduce_scatter"): (2.4, 0.3, 16.0),
            },
        ),
        (
            Layout(kind="experts", tp=2),
            {("forward", "all_to_all"): (2.4, 2.4, 0.0), ("backward", "all_to_all"): (2.4, 2.4, 0.0)},
        ),
    ],
)
def test_reports_know_what_is_hidden_in_which_phase(
    tmp_path: Path, layout: Layout, truth: dict[tuple[str, str], tuple[float, float, float]]
) -> None:
    replace(layout, num_ranks=4, per_node=2, num_steps=12).write(tmp_path / "run")
    (loaded,) = load_runs([tmp_path / "run"])
    assert loaded.measured is not None and loaded.measured.overlap is not None
    found = {(one.phase, one.op): one for one in loaded.measured.overlap}
    assert sorted(found) == sorted(truth)
    for kind, times_ms in truth.items():
        row = found[kind]
        assert np.array([row.transfer_ns, row.exposed_ns, row.window_ns]) / MS == pytest.approx(times_ms, abs=0.1)
