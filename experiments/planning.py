"""Predictions of `hpcpace plan` beside steps that others measured and published.

`python -m experiments.planning [--calculon FOLDER] [--write]`; FOLDER is a checkout of calculon-ai/calculon, which then
predicts the same steps in the same run. See docs/results/plan.md.

Options:
  --calculon PATH  folder of a checkout of calculon-ai/calculon
  --write          write docs/results/plan.md
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from experiments.machine_fit import Fit, Measured, fit
from experiments.options import command_line
from experiments.pages import command, counted, table, write_page
from hpcpace.metrics import Floats
from hpcpace.planning.engine import Job
from hpcpace.planning.files import read_machine
from hpcpace.planning.layouts import Layouts, Recompute, enumerate_layouts
from hpcpace.planning.machine import Machine
from hpcpace.planning.model import MeasuredModel, Transformer, preset
from hpcpace.planning.steps import TransformerSteps, steps_of

DATA = Path(__file__).parents[1] / "tests" / "data" / "published"
_GIB = 1 << 30


def main() -> None:
    args = command_line(__doc__)
    sections = {
        "megatron": megatron_section(),
        "selene": selene_section(args.calculon),
        "nano": nano_section(),
        "resnet": resnet_section(),
        "speed": speed_section(args.calculon),
    }
    if args.write:
        words = command("experiments.planning").replace(f" {args.calculon}", " FOLDER")
        write_page("plan", others=["In the lab"], command=words, **sections)
    else:
        print("\n\n".join(sections.values()))


# Megatron-DeepSpeed on 64 to 512 A100, measured for vTrain.


@dataclass(frozen=True)
class MegatronSteps:
    """The 109 published steps.

    Attributes:
        values: the columns of the file, float64, (num_steps, num_columns).
    """

    values: Floats

    @classmethod
    def read(cls) -> MegatronSteps:
        with (DATA / "vtrain_multi.csv").open(newline="", encoding="utf-8") as file:
            return cls(np.array([[float(value) for value in row] for row in list(csv.reader(file))[1:]]))

    @cached_property
    def num_gpus(self) -> Floats:
        return self.values[:, 1]

    @cached_property
    def step_s(self) -> Floats:
        return self.values[:, -1] / 1e3

    def measured(self, which: Sequence[int], machine: Machine) -> list[Measured]:
        """Return some of the steps, those of each model together and in the order of `which`."""
        by_model = groupby(which, lambda row: tuple(self.values[row, [0, 4, 5, 6, 7]]))
        return [
            Measured(job=_megatron_job(list(shape), machine), layouts=self._layouts(rows), step_s=self.step_s[rows])
            for shape, rows in ((key, list(found)) for key, found in by_model)
        ]

    def _layouts(self, rows: Sequence[int]) -> Layouts:
        _, _, batch, micro, *_, tp, dp, pp, _ = self.values[rows].astype(np.int64).T
        return Layouts.of(
            dp=dp, pp=pp, tp=tp, micro_batch=micro, num_micro=batch // dp // micro, recompute=Recompute.FULL
        )


def _megatron_job(shape: list[float], machine: Machine) -> Job:
    billions, hidden, heads, layers, sequence = shape
    model = Transformer(
        name=f"{billions:g}B",
        num_layers=int(layers),
        hidden=int(hidden),
        num_heads=int(heads),
        sequence=int(sequence),
        vocabulary=51200,
        is_attention_fused=False,
    )
    return Job(model=model, machine=machine, is_dp_inner=True, overlaps=False, gradient_bytes=4)


def guess() -> Machine:
    """An A100 as its data sheet has it, with what matrix products and links usually reach of it."""
    return Machine(
        name="a100",
        gpus_per_node=8,
        memory_bytes=80e9,
        flops=200e12,
        memory_rate=1.5e12,
        layer_s=1e-3,
        node_rate=150e9,
        network_rate=80e9,
        is_of_rings=True,
    )


def fitted() -> Fit:
    """The machine that explains the steps on 64 and 256 GPUs, which `machines.toml` has as a100."""
    steps = MegatronSteps.read()
    return fit(steps.measured(np.flatnonzero(steps.num_gpus < 512).tolist(), guess()), guess())


def predictions(found: Fit, rows: Sequence[int]) -> tuple[Floats, Floats]:
    """Return measured and predicted seconds of some of the steps."""
    measured = MegatronSteps.read().measured(rows, found.machine)
    predicted = [steps_of(one.job.on(found.machine), one.layouts).step_s for one in measured]
    return np.concatenate([one.step_s for one in measured]), np.concatenate(predicted)


def megatron_section() -> str:
    found, steps = fitted(), MegatronSteps.read()
    rows = []
    for label, chosen in (
        ("64 and 256 GPUs, fitted", steps.num_gpus < 512),
        ("512 GPUs, 39.1 B", (steps.num_gpus == 512) & (steps.values[:, 0] < 100)),
        ("512 GPUs, 175 B", (steps.num_gpus == 512) & (steps.values[:, 0] > 100)),
        ("512 GPUs", steps.num_gpus == 512),
    ):
        measured, predicted = predictions(found, np.flatnonzero(chosen).tolist())
        error = np.abs(predicted / measured - 1)
        inside = np.abs(np.log(measured / predicted)) <= found.half_width
        rows.append(
            (label, len(error), f"{100 * error.mean():.1f} %", f"{100 * np.median(error):.1f} %", counted(inside))
        )
    machine = found.machine
    constants = (
        f"{machine.flops / 1e12:.1f} Tflop/s, {machine.memory_rate / 1e9:.0f} GB/s of memory, "
        f"{1e6 * machine.layer_s:.0f} us a layer, {machine.node_rate / 1e9:.0f} GB/s in a node, "
        f"{machine.network_rate * 8 / 1e9:.0f} Gb/s between nodes"
    )
    head = ("steps", "number", "mean error", "median error", f"inside the interval of {100 * found.half_width:.0f} %")
    return f"{table(head, rows)}\n\nConstants found: {constants}."


# Selene, the cluster of Korthikanti et al. 2023, table 5 (times) and figure 1 (memory).


@dataclass(frozen=True)
class SeleneRow:
    """A model on Selene; seconds of a step with full recomputation and with selective and split sequences."""

    name: str
    shape: tuple[int, int, int]
    """Layers, hidden, heads."""
    pp: int
    interleave: int
    batch: int
    micro: int
    full_s: float
    selective_s: float
    kept_gib: tuple[float, float, float]
    """Parameters with state, activations without recomputation, and with selective one and split sequences."""

    def steps(self, machine: Machine, *, is_full: bool, recompute: Recompute | None = None) -> TransformerSteps:
        layers, hidden, heads = self.shape
        model = Transformer(
            name=self.name,
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            sequence=2048,
            vocabulary=51200,
            is_attention_fused=False,
        )
        chosen = recompute if recompute is not None else (Recompute.FULL if is_full else Recompute.SELECTIVE)
        layouts = Layouts.of(
            pp=self.pp,
            tp=8,
            micro_batch=self.micro,
            num_micro=self.batch // self.micro,
            interleave=self.interleave,
            recompute=chosen,
            is_sequence_split=int(not is_full),
        )
        job = Job(model=model, machine=machine, is_dp_inner=True, overlaps=False, gradient_bytes=4)
        return TransformerSteps(job, layouts, model)


SELENE = (
    SeleneRow("megatron-22B", (48, 6144, 64), 1, 1, 4, 4, 1.42, 1.10, (45.5625, 59.25, 9.5625)),
    SeleneRow("gpt3-175B", (96, 12288, 96), 8, 3, 64, 1, 18.13, 13.75, (45.5625, 66.84375, 12.3515625)),
    SeleneRow("turing-530B", (105, 20480, 128), 35, 3, 280, 1, 49.05, 37.83, (31.640625, 114.0234375, 23.076171875)),
    SeleneRow("megatron-1T", (128, 25600, 160), 64, 1, 512, 1, 94.42, 71.49, (32.958984375, 131.25, 26.5625)),
)


def selene_section(calculon: Path | None) -> str:
    known = read_machine("a100")
    peers = {} if calculon is None else calculon_steps_s(calculon)
    rows, errors, peer_errors = [], [], []
    for row in SELENE:
        for is_full, measured_s in ((True, row.full_s), (False, row.selective_s)):
            predicted_s = float(row.steps(known.machine, is_full=is_full).step_s[0])
            name = "full" if is_full else "selective, sequences split"
            cells = [row.name, name, f"{measured_s:.2f} s", *_beside(predicted_s, measured_s)]
            errors.append(abs(predicted_s / measured_s - 1))
            if peers:
                theirs = peers[row.name, "full" if is_full else "seqsel"]
                cells += _beside(theirs, measured_s)
                peer_errors.append(abs(theirs / measured_s - 1))
            rows.append(cells)
    head = ["model", "recomputation", "measured", "predicted", "off", *(["Calculon", "off"] if peers else [])]
    means = f"Mean error {100 * np.mean(errors):.1f} %, largest {100 * max(errors):.1f} %"
    if peers:
        means += f"; Calculon {100 * np.mean(peer_errors):.1f} and {100 * max(peer_errors):.1f} %"
    return f"{table(head, rows)}\n\n{means}.\n\n{_selene_fitted(known.machine)}\n\n{_selene_memory(known.machine)}"


def _selene_fitted(machine: Machine) -> str:
    """Return how far off steps of two models are with constants from those of the other two."""
    measured = {
        row.name: [
            Measured(job=steps.job, layouts=steps.layouts, step_s=np.array([step_s]))
            for is_full, step_s in ((True, row.full_s), (False, row.selective_s))
            for steps in [row.steps(machine, is_full=is_full)]
        ]
        for row in SELENE
    }
    lines = []
    for fitting in (("megatron-22B", "megatron-1T"), ("gpt3-175B", "turing-530B"), ("megatron-22B", "gpt3-175B")):
        found = fit([one for name in fitting for one in measured[name]], machine).machine
        others = [one for name in measured if name not in fitting for one in measured[name]]
        off = [float(steps_of(one.job.on(found), one.layouts).step_s[0] / one.step_s[0] - 1) for one in others]
        lines.append(f"- fitted on {' and '.join(fitting)}: {', '.join(f'{100 * one:+.1f} %' for one in off)}")
    return "Off on the other four steps, with constants fitted on four from those of a100:\n\n" + "\n".join(lines)


def _selene_memory(machine: Machine) -> str:
    rows = []
    for row in SELENE:
        for is_full, recompute, index in ((True, Recompute.NONE, 1), (False, Recompute.SELECTIVE, 2)):
            steps = row.steps(machine, is_full=is_full, recompute=recompute)
            state, kept = steps.state_bytes[0] / _GIB, steps.activations_in_flight_bytes[0] / _GIB
            theirs = row.kept_gib[0] + row.kept_gib[index]
            name = "none" if index == 1 else "selective, sequences split"
            cells = [row.name, name, f"{row.kept_gib[0]:.1f}", f"{state:.1f}", f"{row.kept_gib[index]:.1f}"]
            rows.append([*cells, f"{kept:.1f}", f"{100 * ((state + kept) / theirs - 1):+.1f} %"])
    head = ["model", "recomputation", "state, published", "state", "activations, published", "activations", "sum off"]
    return table(head, rows)


def _beside(predicted: float, measured: float) -> list[str]:
    return [f"{predicted:.2f} s", f"{100 * (predicted / measured - 1):+.1f} %"]


def calculon_steps_s(folder: Path) -> dict[tuple[str, str], float]:
    """Return what Calculon predicts for the steps of Selene, with its own description of the machine."""
    run = _calculon(folder)
    return {(row.name, mode): run(row.name, mode) for row in SELENE for mode in ("full", "seqsel")}


def _calculon(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    import logging

    from calculon.io import read_json_file
    from calculon.llm import Llm
    from calculon.system import System

    system = System(read_json_file(str(folder / "systems" / "a100_80g.json")))

    def step_s(name: str, mode: str) -> float:
        model = Llm(Llm.Application(read_json_file(str(folder / "models" / f"{name}.json"))), logging.getLogger())
        setup = read_json_file(str(folder / "validation" / "seqsel" / "tab5" / f"{name}_{mode}.json"))
        model.compile(system, Llm.Execution.from_json(setup))
        model.run(system)
        return float(model.get_stats_json(False)["total_time"])

    return step_s


# The nano cluster: two servers of two A40 each, 1 Gb/s between them.

_LINK_BPS = 0.94e9  # payload of TCP over Ethernet of 1 Gb/s: 1448 of 1538 bytes
_BATCH = 16  # sequences of a replica, as the published traffic implies: analysis/library/published.py


@dataclass(frozen=True)
class NanoFit:
    """A40 servers as one server alone shows them, and the microbatches of the pipeline that explain it best."""

    machine: Machine
    microbatches: int


def nano_rows() -> dict[tuple[str, str], float]:
    """Return tokens per second of each published set-up, and of one GPU: the median of those that scale from it."""
    found, ones = {}, []
    with (DATA / "nano_cluster_gpt2_small.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = f"{row['servers']}x{row['gpus_per_server']}"
            found[place, row["parallelism"]] = speed = 1e3 * float(row["throughput_ktokens_per_s"])
            if place == "1x2":
                ones.append(speed / 2 / float(row["scaling_factor"]))
    return {("1x1", "none"): float(np.median(ones)), **found}


def nano_layout(place: str, parallelism: str, microbatches: int) -> Layouts:
    servers, per_server = (int(part) for part in place.split("x"))
    num = servers * per_server
    if parallelism == "pipeline":
        return Layouts.of(pp=num, micro_batch=_BATCH // microbatches, num_micro=microbatches)
    return Layouts.of(**{"dp" if parallelism == "data" else "tp": num}, micro_batch=_BATCH, num_micro=1)


def nano_job(place: str, machine: Machine, *, is_hierarchical: bool | None = None) -> Job:
    model = preset("gpt2-small")
    assert model is not None
    machine = replace(machine, gpus_per_node=int(place[-1]))
    model = replace(model, is_attention_fused=False)
    return Job(model=model, machine=machine, gradient_bytes=4, is_hierarchical=is_hierarchical)


@cache
def fit_nano() -> NanoFit:
    """Fit one server: 1x1 and 1x2 alone, with 1, 2, 4 or 8 microbatches, which the study does not name."""
    a40 = read_machine("a40").machine
    prior = replace(a40, network_rate=_LINK_BPS / 8, network_latency_s=50e-6, is_of_rings=False)
    tried = []
    for microbatches in (1, 2, 4, 8):
        measured = [
            Measured(job=nano_job("1x2", prior), layouts=layout, step_s=layout.sequences * 1024.0 / speed)
            for (place, parallelism), speed in nano_rows().items()
            if place in ("1x1", "1x2")
            for layout in [nano_layout(place, parallelism, microbatches)]
        ]
        machine = fit(measured, prior).machine
        off = [np.log(one.step_s / steps_of(one.job.on(machine), one.layouts).step_s)[0] for one in measured]
        # The link's rate is given, and one server does not show it.
        machine = replace(machine, network_rate=prior.network_rate, network_latency_s=prior.network_latency_s)
        tried.append((float(np.sum(np.square(off))), microbatches, machine))
    _, microbatches, machine = min(tried, key=lambda one: one[0])
    return NanoFit(machine, microbatches)


@dataclass(frozen=True)
class NanoRow:
    """A published set-up.

    Attributes:
        place: servers and GPUs of each.
        parallelism: of it.
        published, predicted: tokens per second.
        ring, first: predicted with rings over all ranks, and with sums on each server first.
    """

    place: str
    parallelism: str
    published: float
    predicted: float
    ring: float
    first: float


def nano_predictions(found: NanoFit) -> list[NanoRow]:
    rows = []
    for (place, parallelism), published in nano_rows().items():
        layout = nano_layout(place, parallelism, found.microbatches)
        jobs = [nano_job(place, found.machine, is_hierarchical=first) for first in (None, False, True)]
        speeds = [1024.0 * float(layout.sequences[0] / steps_of(job, layout).step_s[0]) for job in jobs]
        rows.append(NanoRow(place, parallelism, published, *speeds))
    return rows


def nano_section() -> str:
    found = fit_nano()
    predictions = nano_predictions(found)
    rows = [
        (row.place, row.parallelism, "fitted" if row.place in ("1x1", "1x2") else "predicted",
         *(f"{speed / 1e3:.2f}k" for speed in (row.published, row.predicted)),
         f"{100 * (row.predicted / row.published - 1):+.0f} %",
         *(f"{speed / 1e3:.2f}k" if row.ring != row.first else "" for speed in (row.ring, row.first)))
        for row in predictions
    ]  # fmt: skip
    orders = []
    for place in ("2x1", "2x2"):
        published, predicted = (in_order(predictions, place, name) for name in ("published", "predicted"))
        same = "as published" if published == predicted else f"published: {published}"
        orders.append(f"- {place}: {predicted} ({same})")
    head = ("servers x GPUs", "parallelism", "", "published tokens/s", "predicted", "off", "ring", "each server first")
    chosen = f"Microbatches of the pipeline that explain one server best: {found.microbatches}."
    return "\n\n".join([table(head, rows), chosen, "\n".join(orders)])


def in_order(rows: Sequence[NanoRow], place: str, name: str) -> str:
    """Return the ways of parallelism at a place in words, fastest first by one of the speeds."""
    here = [row for row in rows if row.place == place]
    return " > ".join(row.parallelism for row in sorted(here, key=lambda row: -getattr(row, name)))


_IMAGES_2X2, _GAIN_2X2, _SCALING_1X2 = 13e3, 1.16, 0.9
_RESNET_PARAMETERS = 11_173_962
_IMAGES_OF_RANK = 2048


def resnet_section() -> str:
    """ResNet-18 in data parallelism, from the published speed of one server."""
    machine = fit_nano().machine
    of_1x2 = _IMAGES_2X2 / _GAIN_2X2
    work_s = 2 / of_1x2
    for _ in range(20):
        work_s *= _images_per_s("1x2", machine, work_s) / of_1x2
    speeds = {place: _images_per_s(place, machine, work_s) for place in ("1x1", "1x2", "2x1", "2x2")}
    rows = [
        ("1x2 over twice 1x1", f"up to {_SCALING_1X2}", f"{speeds['1x2'] / speeds['1x1'] / 2:.2f}"),
        ("2x2 over 1x2", f"{_GAIN_2X2}", f"{speeds['2x2'] / speeds['1x2']:.2f}"),
        ("images/s at 2x2", f"{_IMAGES_2X2 / 1e3:.0f}k", f"{speeds['2x2'] / 1e3:.1f}k"),
    ]
    return table(("ResNet-18, batch 2048 a rank", "published", "predicted"), rows)


def _images_per_s(place: str, machine: Machine, work_s: float) -> float:
    model = MeasuredModel(
        name="resnet18",
        gradient_bytes=4.0 * _RESNET_PARAMETERS,
        forward_s=work_s / 3,
        backward_s=2 * work_s / 3,
        update_s=0.0,
    )
    servers, per_server = (int(part) for part in place.split("x"))
    layout = Layouts.of(dp=servers * per_server, micro_batch=_IMAGES_OF_RANK)
    job = Job(model=model, machine=replace(machine, gpus_per_node=per_server))
    return float(layout.sequences[0] / steps_of(job, layout).step_s[0])


def speed_section(calculon: Path | None) -> str:
    """How many layouts a second are computed, enumeration included."""
    _, row, *_ = SELENE
    layers, hidden, heads = row.shape
    model = Transformer(
        name=row.name, num_layers=layers, hidden=hidden, num_heads=heads, sequence=2048, vocabulary=51200
    )
    begin_s = time.perf_counter()
    layouts = [enumerate_layouts(model, 1024, batch) for batch in (1024, 2048, 3072, 4096, 6144, 8192)]
    for one in layouts:
        steps = steps_of(Job(model=model, machine=read_machine("a100").machine), one)
        assert (steps.step_s > 0).all() and (steps.memory_bytes > 0).all() and (steps.network_bytes >= 0).all()
    num, took_s = sum(map(len, layouts)), time.perf_counter() - begin_s
    lines = [f"{num:,} layouts of 175 B on 1,024 GPUs in {took_s:.1f} s: {num / took_s:,.0f} a second"]
    if calculon is not None:
        run, count, begin_s = _calculon(calculon), 0, time.perf_counter()
        while time.perf_counter() - begin_s < 2:
            run(row.name, "seqsel")
            count += 1
        lines.append(f"Calculon: {count / (time.perf_counter() - begin_s):,.0f} a second, one at a time")
    return "\n".join(f"- {line}" for line in lines)


if __name__ == "__main__":
    main()
