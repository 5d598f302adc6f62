"""How each step of first light measures: nine functions, each of which notes figures at its place."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from experiments.gpu.place import JOB, Place, answer, device_share, traces_of, verdict_words
from hpcpace.audit.snapshot import read_nvml
from hpcpace.audit.tree import Unreadable
from hpcpace.core.rundir import open_run
from hpcpace.metrics.kernels import library
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.observe.host.counters import gpu_counters, gpu_in_use
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import ExitKind, Op, Phase


def _machine(place: Place) -> None:
    """Versions, what NVML answers, and what the audit says of the machine."""
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


_DONE = re.compile(r"tests/gpu/(\S+?::\S+) (PASSED|FAILED|ERROR|SKIPPED)")


def _suite(place: Place) -> None:
    """The tests that need a GPU, counted as they end, so that a time limit leaves those that were done."""
    outcomes: dict[str, str] = {}

    def read(line: str) -> None:
        if found := _DONE.match(line):
            outcomes[found[1]] = found[2].lower()
            counts = Counter(outcomes.values())
            wrong = [name.rpartition("::")[2] for name, outcome in outcomes.items() if outcome in ("failed", "error")]
            place.note(
                tests=", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())),
                failed=", ".join(wrong) or "none",
            )

    options = ("-v", "-p", "no:cacheprovider", "-m", "gpu", "--color", "no")
    place.run(sys.executable, "-m", "pytest", *options, "tests/gpu", read=read, codes=(0, 1))
    if place.is_rehearsal:
        place.note(tests=f"{place.figures['tests']}; left out: all that the tests do, which needs CUDA")


_WARMUP = 3


def _alone(place: Place) -> None:
    """GPT-2 in a world of one, as `hpcpace train` trains it: speed, times on the device, and what the report says."""
    run = place.folder / "run"
    num_steps = place.choose(100, 30)
    kind = ("--backend", place.backend, "--dtype", place.choose("bf16", "float32"))
    sizes = ("--preset", place.choose("small", "tiny"), "--batch-size", place.choose(12, 2))
    steps = ("--seq-len", place.choose(1024, 32), "--steps", num_steps, "--run-dir", run, "--progress", "off")
    place.hpcpace("train", "gpt2", "--device", place.device, *kind, *sizes, *steps)
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


_SLOW_RANK = 2


def _shared(place: Place) -> None:
    """Four ranks on one GPU over gloo: what their reports say without a fault, with one, and with foreign kernels."""
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


_NUM_STEPS, _NUM_BEFORE = 20, 20
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_MAX_DIFFERENCE = 0.05


def _profiled(place: Place) -> None:
    """The same steps seen by torch.profiler, imported, and by hpcpace: how far phases and collectives are apart."""
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


_NUM_PAIRS = 10
"""Of blocks, which take turns."""
_SETTLE_S = 1.1
"""Marks of a session are not read before a second has passed (hpcpace.observe.device.clock)."""
_ADDED = re.compile(r"step time (.+?) of ([\d.]+) ms, (.+?) (\S+ % \[.+?\])")


def _cost(place: Place) -> None:
    """What tracing costs, by the benchmarks that measure it on CPUs, too."""
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


_RATE = re.compile(r"^  (\S+) +([\d.]+) tokens/s", re.MULTILINE)
_MFU = re.compile(r"MFU at a peak of .*")


def _speed(place: Place) -> None:
    """Tokens a second and the use of the peak (MFU) beside other GPT-2s."""
    missing = [name for name in ("transformers", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        words = f"left out: {' and '.join(missing)} not installed (the group bench)"
        place.note(tokens=words, mfu=words)
        return
    checkout = Path(os.environ.get("NANOGPT", "build/nanoGPT"))
    nanogpt = ("--nanogpt", checkout) if (checkout / "model.py").is_file() else ()
    found = place.bench(
        *("training", "tokens", "--device", place.device, "--dtype", place.choose("bf16", "float32")),
        *("--preset", place.choose("small", "tiny"), "--seq-len", place.choose(1024, 64)),
        *("--batch-size", place.choose(12, 1), "--block-steps", place.choose(8, 2), "--pairs", place.choose(8, 2)),
        *nanogpt,
    )
    rates = ", ".join(f"{name} {float(rate):,.0f}" for name, rate in _RATE.findall(found))
    place.note(tokens=rates if nanogpt else f"{rates}; no checkout of nanoGPT in {checkout}")
    share = _MFU.search(found)
    place.note(mfu=share[0] if share else f"left out: no peak is known of {'CPUs' if place.is_rehearsal else 'it'}")


_ABSENT = 1
_ANY_CODE = range(-64, 256)
_TIMEOUT_S = 3


def _hangs(place: Place) -> None:
    """Judge a rank that never calls an operation, and a dump that NCCL's watchdog writes of one that never ends."""
    run = place.folder / "run"
    said = place.job(
        run,
        *("--steps", 40, "--width", 256, "--layers", 4, "--rows", 256, "--absent", _ABSENT),
        ranks=3,
        trace=("--on-hang", "stop"),
        environ={"HPCPACE_HANG_LEAST_S": "3", "HPCPACE_HANG_FACTOR": "3"},
        codes=_ANY_CODE,
    )
    ended = re.search(r"step \d+ has lasted .*; the job ends here", said)
    place.note(stopped=answer(ended is not None, ended[0] if ended else "it ended by itself"))
    place.note(absent=_judged(place, run, kinds=("never_called", "own_work"), culprits=[_ABSENT]))
    dumps = place.folder / "dumps"
    dumps.mkdir()
    place.run(
        *(sys.executable, "-m", "experiments.gpu.job", "--device", place.device, "--stuck", _TIMEOUT_S),
        environ={
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        },
        codes=_ANY_CODE,
    )
    if not os.listdir(dumps):
        place.note(dump="NO: no dump was written")
        return
    words = _judged(place, dumps, kinds=("network", "unknown"), culprits=[])
    place.note(dump=f"left out: NCCL's watchdog; of gloo's record {words}" if place.is_rehearsal else words)


def _judged(place: Place, what: object, *, kinds: tuple[str, ...], culprits: list[int]) -> str:
    found = json.loads(place.hpcpace("hang", "--json", what, codes=(0, 1, 3), is_json=True))
    hang = found.get("hang") or {}
    is_right = hang.get("kind") in kinds and hang.get("culprits") == culprits
    return answer(is_right, f"{hang.get('kind', 'nothing hangs')}, culprits {hang.get('culprits', [])}")


_LOW_MHZ = 600


def _habits(place: Place) -> None:
    """Jobs of one rank with habits of their own: tiny kernels, sharded parameters, and a GPU at a lower clock."""
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


_ALL = (_machine, _suite, _alone, _shared, _profiled, _cost, _speed, _hangs, _habits)
MEASURES = {measure.__name__.strip("_"): measure for measure in _ALL}
"""By the name in a step."""
