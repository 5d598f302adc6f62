from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.observe.host.counters import UNKNOWN, Gpu, HostCounters, gpu_counters, gpu_in_use
from hpcpace.trace.schema import TABLES

COLUMNS = [name for name in TABLES["host"].dtype.names or () if name.startswith("gpu_")]


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """A pynvml of one GPU, of which questions named in `fails` are not supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC = 1, 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1

    def __init__(self, fails: tuple[str, ...] = (), **answers: Any) -> None:
        super().__init__()
        self.answers = {
            "MemoryInfo": SimpleNamespace(used=40 << 30), "ClockInfo": 1215, "CurrentClocksThrottleReasons": 0x40,
            "MaxClockInfo": 1980, "Temperature": 91, "PowerUsage": 312_000, "EnforcedPowerLimit": 700_000,
            "PcieReplayCounter": 5, **answers,
        }  # fmt: skip
        self.fails = fails

    def nvmlInit(self) -> None:
        if "Init" in self.fails:
            raise NVMLError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return (3, 2)[kind]

    def __getattr__(self, name: str) -> Any:
        question = name.removeprefix("nvmlDeviceGet")
        if question not in self.answers:
            raise AttributeError(name)

        def ask(*_: Any) -> Any:
            if question in self.fails:
                raise NVMLError("not supported")
            return self.answers[question]

        return ask


class FakeTorch(SimpleNamespace):
    """A torch whose allocator has counted; it must not be asked before CUDA is initialised."""

    def __init__(self, *, is_initialized: bool = True, error: Exception | None = None) -> None:
        def memory_stats(index: int) -> dict[str, int]:
            assert is_initialized
            if error is not None:
                raise error
            return {"num_alloc_retries": 4 + index, "num_ooms": 1}

        super().__init__(cuda=SimpleNamespace(is_initialized=lambda: is_initialized, memory_stats=memory_stats))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    def read(nvml: Any, torch: Any = None, warnings: list[str] | None = None) -> dict[str, int]:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setitem(sys.modules, "torch", torch)
        warn = (warnings if warnings is not None else []).append
        return dict(zip(COLUMNS, gpu_counters(Gpu("GPU-1", 2), warn)(), strict=True))

    return read


def test_a_gpu_is_found_once_torch_uses_one_and_not_begun_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("this initialises CUDA")

    idle = SimpleNamespace(is_initialized=lambda: False, current_device=refused, get_device_properties=refused)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=idle))
    assert gpu_in_use() is None
    busy = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 3,
        get_device_properties=lambda number: SimpleNamespace(uuid=f"3f{number}"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=busy))
    assert gpu_in_use() == Gpu("GPU-3f3", 3)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_in_use() is None


def test_reads_clocks_heat_power_and_errors_in_the_order_of_the_columns(read: Any) -> None:
    assert read(FakeNvml(), FakeTorch()) == {
        "gpu_memory_bytes": 40 << 30, "gpu_clock_mhz": 1215, "gpu_throttle_reasons": 0x40, "gpu_max_clock_mhz": 1980,
        "gpu_temperature_c": 91, "gpu_power_mw": 312_000, "gpu_power_limit_mw": 700_000, "gpu_ecc_corrected": 3,
        "gpu_ecc_uncorrected": 2, "gpu_pcie_replays": 5, "gpu_alloc_retries": 6, "gpu_out_of_memory": 1,
    }  # fmt: skip


def test_a_question_that_a_card_does_not_support_reads_as_zero(read: Any) -> None:
    row = read(FakeNvml(fails=("Temperature", "MemoryInfo")))
    assert (row["gpu_temperature_c"], row["gpu_memory_bytes"], row["gpu_clock_mhz"]) == (0, 0, 1215)


def test_a_library_that_lacks_a_question_reads_as_zero(read: Any) -> None:
    nvml = FakeNvml()
    del nvml.answers["EnforcedPowerLimit"]
    assert read(nvml)["gpu_power_limit_mw"] == 0


@pytest.mark.parametrize("value", [(1 << 64) - 1, (1 << 32) - 1, -1])
def test_a_value_that_is_not_available_reads_as_zero(read: Any, value: int) -> None:
    assert read(FakeNvml(PowerUsage=value))["gpu_power_mw"] == 0


def test_without_nvml_the_allocator_is_read_and_one_warning_says_why(read: Any) -> None:
    for nvml, reason in ((None, "install hpcpace[gpu]"), (FakeNvml(fails=("Init",)), "NVML says no driver")):
        warnings: list[str] = []
        row = read(nvml, FakeTorch(), warnings)
        assert (sum(row.values()), row["gpu_alloc_retries"], row["gpu_out_of_memory"]) == (7, 6, 1)
        assert [warning.removeprefix("no GPU counters: ") for warning in warnings] == [reason]


@pytest.mark.parametrize("torch", [None, FakeTorch(is_initialized=False), FakeTorch(error=RuntimeError("pluggable"))])
def test_an_allocator_that_counts_nothing_or_is_not_started_is_left_alone(read: Any, torch: Any) -> None:
    row = read(FakeNvml(), torch)
    assert (row["gpu_alloc_retries"], row["gpu_out_of_memory"], row["gpu_clock_mhz"]) == (0, 0, 1215)


def test_a_row_of_the_host_has_the_columns_of_its_gpu_and_zeros_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setitem(sys.modules, "torch", FakeTorch())
    names = (TABLES["host"].dtype.names or ())[1:]
    host = HostCounters()
    host.use_gpu(Gpu("GPU-1", 1))
    row = dict(zip(names, host.read(), strict=True))
    assert [row[name] for name in COLUMNS] == [40 << 30, 1215, 0x40, 1980, 91, 312_000, 700_000, 3, 2, 5, 5, 1]
    row = dict(zip(names, HostCounters().read(), strict=True))
    assert tuple(row[name] for name in COLUMNS) == UNKNOWN
