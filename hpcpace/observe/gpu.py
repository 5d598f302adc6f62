"""What holds this rank's GPU back, once a second: NVML's clocks, heat, power and error counters, and torch's allocator.

Reading waits for nothing on the device, and CUDA is never initialised here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_NO_NVML, _NO_ALLOCATOR = (0,) * 10, (0,) * 2
UNKNOWN = (*_NO_NVML, *_NO_ALLOCATOR)
"""What is read where there is no GPU."""
_MOST_I4, _MOST_I8 = (1 << 31) - 1, (1 << 62) - 1


class Gpu(NamedTuple):
    """A rank's GPU: its identity for NVML, like `GPU-3f...`, and its number in torch, which is another than NVML's."""

    uuid: str
    number: int


def gpu_in_use() -> Gpu | None:
    """Return the GPU that this thread computes on; None where torch has not begun to use any, so as not to begin it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device()
    return Gpu(f"GPU-{torch.cuda.get_device_properties(number).uuid}", number)


def gpu_counters(gpu: Gpu, warn: Callable[[str], None]) -> Callable[[], tuple[int, ...]]:
    """Return a function that reads the GPU's columns of a `host` row, in their order; what is unknown reads as zero.

    Args:
        gpu: of this rank.
        warn: takes one warning that says why NVML's columns stay zero.
    """
    nvml = _open(gpu.uuid, warn)

    def read() -> tuple[int, ...]:
        return (*(nvml() if nvml is not None else _NO_NVML), *_allocator(gpu.number))

    return read


def _open(uuid: str, warn: Callable[[str], None]) -> Callable[[], tuple[int, ...]] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except ImportError:
        warn("no GPU counters: install hpcpace[gpu]")
        return None
    except pynvml.NVMLError as error:
        warn(f"no GPU counters: NVML says {error}")
        return None

    def ask(function: str, *arguments: int, most: int = _MOST_I8) -> int:
        try:
            value = int(getattr(pynvml, function)(handle, *arguments))
        except (AttributeError, pynvml.NVMLError):  # a library or a card that does not know the question
            return 0
        return value if 0 <= value <= most else 0  # NVML says -1 of any width where a value is not available

    def memory_bytes() -> int:
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError:
            return 0

    def read() -> tuple[int, ...]:
        return (
            memory_bytes(),
            ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM, most=_MOST_I4),
            ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM, most=_MOST_I4),
            ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU, most=_MOST_I4),
            ask("nvmlDeviceGetPowerUsage", most=_MOST_I4),
            ask("nvmlDeviceGetEnforcedPowerLimit", most=_MOST_I4),
            ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
            ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
            ask("nvmlDeviceGetPcieReplayCounter"),
        )

    return read


def _allocator(index: int) -> tuple[int, int]:
    """Return how often torch's allocator freed its cache to try again, and how often memory ran out."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _NO_ALLOCATOR
    try:
        # Takes the allocator's lock for a copy of its counters, and calls nothing of the driver.
        stats = torch.cuda.memory_stats(index)
    except RuntimeError:  # an allocator that counts nothing
        return _NO_ALLOCATOR
    return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))
