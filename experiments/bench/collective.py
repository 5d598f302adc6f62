"""Measures what observation adds to a collective: an all-reduce over gloo in a world of one, observed by each layer.

Blocks of plain calls, of observed calls and of torch's `record_function` (without a profiler) take turns in one process
on one core. The figures are processor time of all threads, since wall time has the scheduler's noise in it; the end of
the step, in which the compiled layer passes its rows on, is in them. The recorder is real and flushes to disk.
`python -m experiments.bench.collective`

With `--on-device` it measures the same of a collective that is observed as on a device: over NCCL with CUDA events
where torch sees a GPU, which has not been tried yet; elsewhere over gloo with events that do nothing, so that the
figure is what Python costs. The host waits for the device between the calls and the end of the step, which is not
counted.

Options:
  --rounds N  [60]
  --calls N  [1000]
  --on-device  observe collectives as on a device
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from experiments.bench.device_marks import anchored_clock
from experiments.bench.models import words
from experiments.bench.pairs import header, interval, on_one_core, take_turns
from experiments.options import command_line
from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver, find_layer
from hpcpace.observe.collectives.operations import Operator
from hpcpace.observe.device.clock import DeviceClock
from hpcpace.observe.device.times import DeviceTimes
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import DEVICE_TABLES

_HEADER = header()
WAYS = (("blocking", False), ("asynchronous, waited for", True))
# Added time in microseconds, and its ratio to record_function.
TARGETS = {"blocking": (5.0, 1.2), "asynchronous, waited for": (6.0, 1.4)}


class EmptyLayer:
    """A layer in Python over all_reduce that only goes on to torch's kernel: the least that one can cost."""

    def install(self) -> None:
        """Install the layer."""
        key = torch._C.DispatchKey.BackendSelect
        redispatch = torch.ops.c10d.allreduce_.default.redispatch
        self._library = torch.library.Library("c10d", "IMPL")
        self._library.impl(
            "allreduce_", lambda keys, *args: redispatch(keys.remove(key), *args), key.name, with_keyset=True
        )

    def uninstall(self) -> None:
        """Remove the layer."""
        self._library._destroy()

    def end_step(self, step: int) -> None:
        """Do nothing."""


class DeviceObserver(CollectiveObserver):
    """The layer in Python as on ranks with a device, whatever the tensors are on."""

    def __init__(self, recorder: Recorder, clock: DeviceClock) -> None:
        self._times = DeviceTimes(clock, recorder.add_collective)
        super().__init__(recorder, warn=print, device_times=self._times)

    @property
    def num_lost(self) -> int:
        """Operations without a row of their times on the device."""
        return self._times.num_refused + self.num_failures + len(self._times.open_rows())

    def _is_on_device(self, keyset: Any, operator: Operator, args: tuple[Any, ...]) -> bool:
        return super()._is_on_device(keyset, operator, args) or (operator.has_work and not torch.cuda.is_available())


Observer = CollectiveObserver | CompiledObserver | EmptyLayer


class Bench:
    """The measurements, each in microseconds of processor time a call, of `num_calls` calls."""

    def __init__(self, recorder: Recorder, *, num_calls: int, is_async: bool, value: Tensor) -> None:
        self._recorder = recorder
        self._num_calls = num_calls
        self._is_async = is_async
        self._value = value

    def plain_us(self) -> float:
        """The call without observation."""
        return self._per_call_us(self._call)

    def record_function_us(self) -> float:
        """torch.profiler's region, with no profiler running."""
        return self._per_call_us(_region)

    def observed_us(self, new_observer: Callable[[], Observer]) -> float:
        """The call with observation, and the end of a step."""
        observer = new_observer()
        observer.install()
        duration_us = self._per_call_us(self._call, then=lambda: observer.end_step(0))
        observer.uninstall()
        return duration_us

    def _call(self) -> None:
        work = dist.all_reduce(self._value, async_op=self._is_async)
        if work is not None:
            work.wait()

    def _per_call_us(self, call: Callable[[], None], then: Callable[[], None] = lambda: None) -> float:
        self._wait()
        begin_ns = time.process_time_ns()
        for _ in range(self._num_calls):
            call()
        called_ns = time.process_time_ns()
        self._wait()
        waited_ns = time.process_time_ns()
        then()
        return (time.process_time_ns() - waited_ns + called_ns - begin_ns) / self._num_calls / 1e3

    def _wait(self) -> None:
        """Wait for the device, so that none of its work is in the way of what comes."""
        if self._value.is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    args = command_line(__doc__)
    on_one_core()
    torch.set_num_threads(1)
    if args.on_device:
        _measure_on_device(args)
    else:
        _measure_on_host(args)


def _measure_on_host(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, is_async in WAYS:
        with _recorder() as recorder:
            bench = Bench(recorder, num_calls=args.calls, is_async=is_async, value=torch.ones(1024))
            layers = _layers(recorder)
            measures = {"plain": bench.plain_us, "record_function": bench.record_function_us}
            measures |= {layer: partial(bench.observed_us, new) for layer, new in layers.items()}
            times = take_turns(measures, num_rounds=args.rounds, num_warmups=2)
        print(f"all_reduce of 4 KiB, {name}, {args.rounds} rounds of {args.calls} calls, processor time:")
        for layer in layers:
            print(_line(layer, times[layer] - times["plain"], times, TARGETS[name]))
    dist.destroy_process_group()


def _measure_on_device(args: argparse.Namespace) -> None:
    has_gpu = torch.cuda.is_available()
    value = torch.ones(1024, device="cuda" if has_gpu else "cpu")
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=value.device if has_gpu else None,
    )
    where = f"NCCL on {words(value.device)}" if has_gpu else "gloo, no device, events that do nothing"
    clock = anchored_clock()
    for name, is_async in WAYS:
        with _recorder(DEVICE_TABLES) as recorder:
            bench = Bench(recorder, num_calls=args.calls, is_async=is_async, value=value)
            observers: list[DeviceObserver] = []
            observed = partial(bench.observed_us, partial(_new_device_observer, recorder, clock, observers))
            times = take_turns({"plain": bench.plain_us, "observed": observed}, num_rounds=args.rounds, num_warmups=2)
        num_lost = sum(observer.num_lost for observer in observers)
        print(
            f"all_reduce of 4 KiB, {name}, {where}, {args.rounds} rounds of {args.calls} calls, processor time:\n"
            f"  observed as on a device: +{interval(times['observed'] - times['plain'], '.1f')} us on "
            f"{float(np.median(times['plain'])):.1f} us; {num_lost} of {args.calls * len(observers)} not recorded"
        )
    dist.destroy_process_group()


def _new_device_observer(recorder: Recorder, clock: DeviceClock, made: list[DeviceObserver]) -> DeviceObserver:
    made.append(DeviceObserver(recorder, clock))
    return made[-1]


@contextmanager
def _recorder(device_tables: Collection[str] = ()) -> Iterator[Recorder]:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "rank-00000.h5", _HEADER, warn=print, device_tables=device_tables)
        recorder.start()
        yield recorder
        recorder.close()


def _layers(recorder: Recorder) -> dict[str, Callable[[], Observer]]:
    layers: dict[str, Callable[[], Observer]] = {}
    layer = find_layer()
    if layer is None:
        print("the compiled layer is not built here: python setup.py build_ext --inplace")
    else:
        layers["compiled layer"] = lambda: CompiledObserver(layer, recorder, warn=print)
    layers["layer in Python"] = lambda: CollectiveObserver(recorder, warn=print, device_times=None)
    layers["layer in Python that does nothing"] = EmptyLayer
    return layers


def _line(layer: str, added: np.ndarray, times: dict[str, np.ndarray], targets: tuple[float, float]) -> str:
    plain, region = (float(np.median(times[name])) for name in ("plain", "record_function"))
    added_us, ratio = interval(added, ".1f"), interval(added / times["record_function"], ".2f")
    return (
        f"  {layer}: +{added_us} us on {plain:.1f} us (target {targets[0]:g} us), "
        f"{ratio} times record_function's {region:.1f} us (target {targets[1]:g})"
    )


def _region() -> None:
    with record_function("all_reduce"):
        pass


if __name__ == "__main__":
    main()
