"""What the benchmarks for a GPU rest on, as far as a CPU shows it: their options, counts of events, and arithmetic."""

from __future__ import annotations

import importlib
import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from torch import Tensor, nn

import hpcpace
from experiments.bench import overhead
from experiments.bench.__main__ import FULL, GPU
from experiments.bench.collective import _HEADER, Bench, DeviceObserver
from experiments.bench.device_marks import EventUse, FreeEvent, counted
from experiments.bench.models import compare, flops_per_token, nanogpt_peer, peak_tflops
from hpcpace.core.config import Config
from hpcpace.core.environment import rank_info
from hpcpace.observe import recording
from hpcpace.observe.collectives.observer import CollectiveObserver
from hpcpace.observe.device.clock import MAX_EVENTS, DeviceClock
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES, ExitKind
from hpcpace.train.settings import GPT2_PRESETS, GPT2Shape

NS_PER_CALL = 1_000_000_000


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class HostEvent(FreeEvent):
    """An event of a device that does everything at once, with the host's time."""

    def __init__(self, enable_timing: bool = True) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.monotonic()

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event.at_s - self.at_s) * 1e3


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def clock() -> DeviceClock:
    """A device that does everything at once, on a host on which a second passes with each look at the clock."""
    return DeviceClock(FreeEvent, clock=itertools.count(NS_PER_CALL, NS_PER_CALL).__next__)


def test_every_benchmark_for_a_gpu_is_one_of_the_benchmarks() -> None:
    assert {name for name, *_ in GPU} <= {name for name, *_ in FULL}


@each_case("row", [row for row in GPU if "cuda" in row], ids=lambda row: row[0])
def test_a_benchmark_for_a_gpu_takes_its_options_and_ends_without_one(
    monkeypatch: pytest.MonkeyPatch, row: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.argv", list(row))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="torch sees"):
        importlib.import_module(f"experiments.bench.{row[0]}").main()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_async", [False, True])
def test_each_collective_observed_as_on_a_device_has_a_row(tmp_path: Path, clock: DeviceClock, is_async: bool) -> None:
    clock.anchor()
    path = tmp_path / "rank-00000.h5"
    recorder = Recorder(path, _HEADER, warn=pytest.fail, device_tables=DEVICE_TABLES)
    recorder.start()
    observer = DeviceObserver(recorder, clock)
    bench = Bench(recorder, num_calls=7, is_async=is_async, value=torch.ones(16))
    bench.observed_us(lambda: observer)
    recorder.close()
    assert observer.num_lost == 0
    assert read_trace(path).tables["collectives"]["exit_kind"].tolist() == [ExitKind.COMPLETION] * 7


def test_collectives_without_an_event_are_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-00000.h5", _HEADER, warn=pytest.fail, device_tables=DEVICE_TABLES)
    times = DeviceObserver(recorder, DeviceClock(FreeEvent, most_events=0))
    assert times._times.begin() is None
    assert times.num_lost == 1


@pytest.mark.usefixtures("process_group")
def test_the_events_of_a_session_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: DeviceClock
) -> None:
    monkeypatch.setattr(recording, "find_device", lambda warn: clock)
    model, mark = nn.Linear(2, 2), DeviceClock.mark
    config = Config(TraceConfig(counters=False, snapshot=False))
    with hpcpace.session(run_dir=tmp_path / "run", config=config, world=rank_info({})) as session:
        session.step()
        with counted() as use:
            for _ in range(5):
                model(torch.ones(1, 2)).sum().backward()
                session.step()
    # Begin and end of forward, of backward and of the step.
    assert use.num_marks == 5 * 6
    assert (use.num_of_operations, use.num_refused) == (0, 0)
    assert use.words(5).startswith("events per step: 6.0 of phases and steps, 0.0 of operations; at most ")
    assert 0 < use.most_in_use <= MAX_EVENTS
    assert use.anchors_s
    assert DeviceClock.mark is mark


@pytest.mark.usefixtures("one_thread")
def test_overhead_compares_times_on_the_device_and_counts_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its way on a GPU, with a CPU in place of the GPU."""
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a CPU")
    monkeypatch.setattr(overhead, "init_process_group", partial(_on_cpu, overhead.init_process_group))
    monkeypatch.setattr(recording, "find_device", lambda warn: DeviceClock(HostEvent, warn=warn))
    monkeypatch.setattr(CollectiveObserver, "_is_on_device", lambda self, keyset, operator, args: operator.has_work)
    options = "--device cuda --dtype bf16 --pairs 1 --block-steps 2 --settle-steps 1 --batch-size 1 --seq-len 8"
    monkeypatch.setattr("sys.argv", ["overhead", *options.split()])
    overhead.main()
    printed = capsys.readouterr().out
    assert "GPT-2 tiny bfloat16, dp=1, 1 pairs of 2 steps, a CPU" in printed
    assert "time on the device" in printed and "processor time" not in printed
    assert "of operations; at most" in printed and " 0 refused" in printed
    # At both ends of each block: a pair, two warm-ups, and the block that counts.
    assert len(waits) == 2 * (2 * (1 + 2) + 1)


@pytest.mark.parametrize(("step_s", "is_warned"), [(0.09, True), (0.11, False)])
def test_overhead_says_where_blocks_begin_before_marks_are_read(
    capsys: pytest.CaptureFixture[str], step_s: float, is_warned: bool
) -> None:
    overhead._print_events(Namespace(settle_steps=10, block_steps=5), EventUse(), step_s=step_s)
    assert ("marks were not read in the blocks" in capsys.readouterr().out) == is_warned


def _on_cpu(init: Callable[..., Any], info: Any, comm: Any, *, device: str) -> Any:
    assert device == "cuda"
    return init(info, comm, device="cpu")


def test_operations_of_training_a_token_are_those_of_the_formula() -> None:
    shape = GPT2Shape(num_layers=1, width=2, num_heads=1, context=5, vocabulary=3)
    # 3 x 2 of the vocabulary, 12 x 4 + 13 x 2 of the block, 4 of the last norm; attention over 4 tokens.
    assert flops_per_token(shape, 4) == 6 * (6 + 48 + 26 + 4) + 12 * 1 * 2 * 4
    assert flops_per_token(GPT2_PRESETS["small"], 1024) == pytest.approx(0.855e9, rel=1e-3)


@each_case(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H200 NVL", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_whole_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def _batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(float(step)), torch.tensor(0.0)


def test_all_that_are_compared_see_the_same_batches(capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, list[float]] = {"ours": [], "one": [], "other": []}

    def step_of(name: str):
        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            seen[name].append(float(inputs))
            return torch.tensor(1.0)

        return step

    steps = {name: step_of(name) for name in seen}
    rates = compare(steps, _batch, num_pairs=2, samples_per_step=8, unit="rows", steps_per_turn=3)
    assert seen["ours"] == seen["one"] == seen["other"] == [float(step) for step in range(3 * (2 + 3))]
    assert list(rates) == list(seen)
    printed = capsys.readouterr().out
    assert "ratio of rows/s, ours to one:" in printed and "ratio of rows/s, ours to other:" in printed


def test_models_whose_losses_part_are_not_compared() -> None:
    steps = {"ours": lambda *_: torch.tensor(1.0), "peer": lambda *_: torch.tensor(1.1)}
    with pytest.raises(AssertionError, match="peer"):
        compare(steps, _batch, num_pairs=1, samples_per_step=1, unit="rows", loss_tolerance=0.05)


def test_a_checkout_of_nanogpt_without_its_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"model\.py does not exist"):
        nanogpt_peer(GPT2_PRESETS["tiny"], tmp_path)
