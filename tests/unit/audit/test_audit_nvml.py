"""What is made of NVML's answers, with a stand-in for the library."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import ModuleType
from typing import Any

import pytest
from cases import each_case

from hpcpace.audit.collect_host import visible_gpus
from hpcpace.audit.facts import RankGpu
from hpcpace.audit.snapshot import kernel_address, read_nvml
from hpcpace.audit.tree import Tree, Unreadable

GPUS = tuple(RankGpu(address=f"0000:{bus}:00.0", uuid=f"GPU-{bus}aa") for bus in ("1b", "2c", "3d"))


_REMOTE = (
    (b"00010000:2C:00.0", b"00010000:2C:00.0", b"", b"00000000:3D:00.0"),
    (b"00000000:1B:00.0", b"00000000:1B:00.0", b"", b"no address"),
)
"""What is at the other end of the links of each GPU; link 2 is down."""


class NVMLError(Exception):
    """As pynvml's."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library with two GPUs, an old driver's bytes, four NVLinks, and questions that it does not answer."""
    module = ModuleType("pynvml")
    pci, rates = namedtuple("pci", "busId"), namedtuple("rates", "gpu memory")
    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: setattr(module, "was_shut_down", True),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda handle: pci(b"00000000:1B:00.0" if handle == 0 else "00010000:2C:00.0"),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 500_000,
        "nvmlDeviceGetEccMode": lambda handle: (1, 0),
        "nvmlDeviceGetUtilizationRates": lambda handle: rates(97, 3),
        "nvmlDeviceGetNvLinkState": _link_state,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: pci(_REMOTE[handle][link]),
        "nvmlDeviceGetGpuFabricInfo": _fabric_info,
    }
    for name, value in answers.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def _fabric_info(handle: int, info: Any) -> None:
    info._obj.state, info._obj.status = (3, 0) if handle == 0 else (3, 999)


def _link_state(handle: int, link: int) -> int:
    if link > 3:
        raise NVMLError("not supported")
    return int(link != 2)


def test_each_question_stands_alone(library: ModuleType) -> None:
    answer = read_nvml(with_facts=True)
    facts = answer.facts["0000:1b:00.0"]
    assert (facts.links_active, facts.links_inactive) == (3, 1)
    assert (facts.power_limit_w, facts.utilization_percent, facts.is_ecc_pending) == (500.0, 97, True)
    assert [one.fabric for one in answer.facts.values()] == ["completed", "failed 999"]
    assert (facts.replays, facts.is_mig, facts.throttle_reasons) == (None, None, None)
    assert library.was_shut_down


def test_active_links_are_counted_by_what_is_at_their_other_end(library: ModuleType) -> None:
    first, second = read_nvml(with_facts=True).facts.values()
    assert first.links_to == {"10000:2c:00.0": 2, "0000:3d:00.0": 1}
    assert second.links_to is None


def test_addresses_are_the_kernels(library: ModuleType) -> None:
    assert [gpu.address for gpu in read_nvml(with_facts=False).visible] == ["0000:1b:00.0", "10000:2c:00.0"]
    assert kernel_address("00000000:D9:00.0") == "0000:d9:00.0"


def test_a_library_that_fails_is_a_reason(library: ModuleType) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    library.nvmlInit = fail
    with pytest.raises(Unreadable, match="NVML does not start: Driver Not Loaded"):
        read_nvml(with_facts=False)


def test_no_library_is_a_reason_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unreadable, match=r"pip install 'hpcpace\[gpu\]'"):
        read_nvml(with_facts=False)


@each_case(
    ("value", "seen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("1,9,0", [1]),
        ("GPU-2c", [1]),
        ("GPU-", []),
        ("nonsense", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, seen: list[int]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    gpus, source = visible_gpus(Tree(), environ, GPUS)
    assert (gpus, source) == (tuple(GPUS[index] for index in seen), "nvml")


def test_a_part_of_a_gpu_has_no_address() -> None:
    gpus, _ = visible_gpus(Tree(), {"CUDA_VISIBLE_DEVICES": "MIG-abc"}, GPUS)
    assert gpus == (RankGpu(address="", uuid="MIG-abc"),)
