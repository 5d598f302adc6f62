"""GPU facts from NVML, NVIDIA's management library, if it is installed; nothing else in the audit needs it.

Each field is queried separately, because drivers and GPUs differ in what they answer.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcpace.audit.facts import Nvml, RankGpu
from hpcpace.audit.tree import Unreadable
from hpcpace.quoting import printable

_MOST_LINKS = 18
_FABRIC_STATES = {0: "none", 1: "not started", 2: "in progress", 3: "completed"}


@dataclass(frozen=True, kw_only=True)
class NvmlAnswer:
    """The GPUs in the library's order, and the facts of each by its PCI address."""

    visible: tuple[RankGpu, ...]
    facts: dict[str, Nvml]


def read_nvml(*, with_facts: bool) -> NvmlAnswer:
    """Return what the library says.

    Args:
        with_facts: whether to ask for more than which GPUs there are.

    Raises:
        Unreadable: the library is not installed, or does not start.
    """
    try:
        import pynvml
    except ImportError:
        raise Unreadable("nvidia-ml-py is not installed: pip install 'hpcpace[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML does not start: {printable(str(error))[:60]}") from None
    try:
        return _read(pynvml, with_facts=with_facts)
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML fails: {printable(str(error))[:60]}") from None
    finally:
        pynvml.nvmlShutdown()


def kernel_address(text: str) -> str:
    """Return NVML's `00000000:17:00.0` as the kernel writes it, `0000:17:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _read(pynvml: Any, *, with_facts: bool) -> NvmlAnswer:
    visible, facts = [], {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        address = kernel_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        visible.append(RankGpu(address=address, uuid=_text(pynvml.nvmlDeviceGetUUID(handle))))
        if with_facts:
            facts[address] = _facts(pynvml, handle)
    return NvmlAnswer(visible=tuple(visible), facts=facts)


def _facts(pynvml: Any, handle: Any) -> Nvml:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments)
        except (AttributeError, pynvml.NVMLError):
            return None

    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    power, power_default = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    utilization, persistence = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPersistenceMode")
    active, inactive = _links(ask)
    return Nvml(
        links_active=active,
        links_inactive=inactive,
        replays=ask("nvmlDeviceGetPcieReplayCounter"),
        throttle_reasons=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        power_limit_w=None if power is None else power / 1000,
        power_default_w=None if power_default is None else power_default / 1000,
        sm_clock_limit_mhz=ask("nvmlDeviceGetApplicationsClock", getattr(pynvml, "NVML_CLOCK_SM", 1)),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", getattr(pynvml, "NVML_CLOCK_SM", 1)),
        utilization_percent=None if utilization is None else int(utilization.gpu),
        is_ecc_pending=None if ecc is None else ecc[0] != ecc[1],
        is_persistent=None if persistence is None else bool(persistence),
        is_mig=None if mig is None else bool(mig[0]),
        fabric=_fabric(ask),
        links_to=_links_to(ask) if active else None,
    )


def _links(ask: Callable[..., Any]) -> tuple[int | None, int | None]:
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_LINKS)]
    known = [bool(state) for state in states if state is not None]
    return (sum(known), len(known) - sum(known)) if known else (None, None)


def _links_to(ask: Callable[..., Any]) -> dict[str, int] | None:
    """Return the number of active NVLinks by the address at their other end; None if NVML does not name one of them."""
    found: dict[str, int] = {}
    for link in range(_MOST_LINKS):
        if ask("nvmlDeviceGetNvLinkState", link):
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
            address = (
                re.fullmatch(r"[0-9a-f]{4,8}(:[0-9a-f]{2}){2}\.[0-7]", _text(remote.busId).lower()) if remote else None
            )
            if not address:
                return None
            name = kernel_address(address[0])
            found[name] = found.get(name, 0) + 1
    return found


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h; some versions of pynvml have another, wrong layout."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    )


def _fabric(ask: Callable[..., Any]) -> str | None:
    info = _FabricInfo(state=255)
    ask("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info))
    state = _FABRIC_STATES.get(info.state)
    # The status means something only once registration is over.
    return f"failed {info.status}" if state == "completed" and info.status else state


def _text(value: Any) -> str:
    # Older versions of the library return bytes.
    return printable(value.decode("ascii", "replace") if isinstance(value, bytes) else str(value))[:60]
