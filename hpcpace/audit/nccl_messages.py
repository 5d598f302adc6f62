"""What single messages of NCCL say, by their first word: network, devices, masks, paths, channels, failures.

The formats are those of the INFO and WARN calls of NCCL 2.4 to 2.28 and of RCCL; versions differ in spaces and names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache

from hpcpace.core.redaction import Redaction
from hpcpace.core.text import printable


class Topic(StrEnum):
    """What a line of NCCL's log is about; the value that is kept with it is in the comment."""

    NETWORK = "network"  # "IB", "Socket", the name of a plugin
    SOCKETS = "sockets"  # "[0]eth0:10.0.0.1<0>"
    BOOTSTRAP = "bootstrap"  # "eth0:10.0.0.1<0>"
    RDMA = "RDMA devices"  # "[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE"
    NO_RDMA = "no RDMA device"
    NO_VERBS = "no libibverbs"
    PLUGIN = "plugin"  # what the plugin says of its failure
    NO_PLUGIN = "no plugin"  # "libnccl-net.so"
    VARIABLE = "variable"  # "NCCL_IB_DISABLE=1"
    AFFINITY = "affinity"  # "GPU 1 000f": its CPUs, as a mask or, since 2.27, a list
    GDR_ON = "GPUDirect RDMA"
    GDR_OFF = "no GPUDirect RDMA"  # "HCA 0 'mlx5_0' (no module)"
    P2P_OFF = "no P2P"
    PATTERN = "pattern"  # "NVL/PIX": types of the paths between GPUs, and to adapters
    NIC_PATH = "path"  # "GPU/B000 SYS": the best path of a GPU to an adapter
    CHANNELS = "channels"  # "2"
    SPEED = "speed"  # "mlx5_0 1/IB 100000": port, and its rate in Mb/s
    TOPOLOGY = "topology"
    SETTING = "system setting"  # what RCCL says of the kernel
    RETRY = "retry"
    ERROR = "error"
    WARNING = "other warning"


_T = Topic
# By the first word of a message, so that a log of TRACE passes quickly; the first that fits counts.
_PATTERNS = {
    b"Using": ((_T.NETWORK, rb"Using network (.{1,60})"),),
    b"NET/Socket": ((_T.SOCKETS, rb"NET/Socket ?: Using (\[0\].{1,300})"),),
    b"Bootstrap": (
        (_T.ERROR, rb"Bootstrap ?: (no socket interface found)"),
        (_T.BOOTSTRAP, rb"Bootstrap ?: Using (?:\[0\])?(.{1,100})"),
    ),
    b"NET/IB": (
        (_T.NO_RDMA, rb"NET/IB ?: (No device found)"),
        (_T.RDMA, rb"NET/IB ?: Using (\[0\].{1,400}?)(?: \[RO\])?(?: ?; ?OOB.*)?$"),
        (_T.SPEED, rb"NET/IB ?: \[\d+\] ([\w.\-]+):(?:[\w.\-]+:)?(\d+/\w+) .{0,80}?speed=(\d{1,8}) "),
        (_T.ERROR, rb"NET/IB ?: (?:\S+ )?(?:Got )?(async (?:error |fatal )?event.{0,120})"),
        (_T.ERROR, rb"NET/IB ?: Got (completion )(?:from peer \S+ )?with (?:error |status=)(\d{1,3})[ ,]"),
    ),
    b"GPU": ((_T.GDR_OFF, rb"GPU Direct RDMA Disabled for (.{1,120})"),),
    b"Failed": (
        (_T.NO_VERBS, rb"Failed to open (libibverbs)"),
        (_T.PLUGIN, rb"(Failed to initialize any NET plugin)"),
    ),
    b"NET/Plugin": ((_T.NO_PLUGIN, rb"(?:Could not find ?: ?|No plugin found \()([\w./\-]+)"),),
    b"External": ((_T.PLUGIN, rb"(External network plugin .{1,120} is unsupported)"),),
    b"NET/OFI": ((_T.PLUGIN, rb"NET/OFI .{0,80}?((?:No eligible|Unable to|failed|initialization failed).+)"),),
    b"Setting": ((_T.AFFINITY, rb"Setting affinity for (GPU \d{1,4}) to ([0-9a-fA-F,\-]+)\s*$"),),
    b"Pattern": ((_T.PATTERN, rb"Pattern .{0,160}type (\w{2,4}/\w{2,4})"),),
    b"P2P": ((_T.P2P_OFF, rb"(P2P is disabled between .{0,20}connected GPUs \d+ and \d+)"),),
    b"Missing": ((_T.SETTING, rb'Missing "?(iommu=pt)'),),
    b"NUMA": ((_T.SETTING, rb"(NUMA auto balancing) enabled"),),
    b"Topology": ((_T.TOPOLOGY, rb"(Topology detection ?: could not read .+, using empty affinity)"),),
    b"XML": ((_T.TOPOLOGY, rb"(XML (?:Topology|Parse|Mismatch|Import).{1,200})"),),
    b"Attribute": ((_T.TOPOLOGY, rb"(Attribute \S+ of node \S+ not found)"),),
    b"Set": ((_T.TOPOLOGY, rb"(Set CPU affinity : unable to find GPU/CPU)"),),
    b"Could": (
        (_T.P2P_OFF, rb"(Could not enable P2P between dev \d+)\(\S+ (and dev \d+)"),
        (_T.TOPOLOGY, rb"(Could not (?:open XML topology file|find real path of) .{1,200})"),
    ),
    b"Mismatched": ((_T.ERROR, rb"(Mismatched NCCL version)"),),
    b"Duplicate": ((_T.ERROR, rb"(Duplicate GPU detected)"),),
    b"Error": ((_T.ERROR, rb"Error: (failed to (?:extend|create shared memory)|Could not map)"),),
    b"Cuda": ((_T.ERROR, rb"(Cuda failure.{1,80})"),),
    b"Timeout": ((_T.ERROR, rb"(Timeout waiting.{0,80})"),),
}
_BY_WORD = {word: [(topic, re.compile(pattern)) for topic, pattern in patterns] for word, patterns in _PATTERNS.items()}
TO_THE_END = frozenset((_T.AFFINITY, _T.VARIABLE, _T.CHANNELS, _T.SPEED, _T.PATTERN, _T.NIC_PATH))
"""Topics whose value would be another one if the end of its line were missing."""

_GDR = re.compile(rb"NET/(?!Socket)[^:]{1,40} : GPU Direct RDMA (?:\([\w\-]+\) )?([Dd]is|[Ee]n)abled for (.{1,120})")
_SET = re.compile(rb"(NCCL_[A-Z0-9_]{1,60}) set (?:by environment )?to (.{0,200}?)\.?\s*$")
_PATH = re.compile(rb"NET/[^ ]{1,20} \([0-9.]+/[0-9.]+/([A-Z0-9]{2,4})\)")
_COLL_CHANNELS = re.compile(rb"(\d{1,4}) coll channels")
_RETRY = re.compile(rb"((?:Call to \w+|\w+: connect to \S+|ncclSocket\w+).{0,160}?), retrying")
_FAILED_CALL = re.compile(
    rb"(Call to (?:ibv_\w+ failed(?: with (?:error )?[^,]{1,60})?|\w+ (?:from \S+ )?failed)|"
    rb"\w*[cC]onnection closed by remote peer|(?:Net|Call).*timed? ?out)"
)
_NEARNESS = (b"LOC", b"NVL", b"C2C", b"PIX", b"PXB", b"PXN", b"P2C", b"PHB", b"NODE", b"SYS")


def facts_of(word: bytes, message: bytes, *, is_warning: bool) -> Iterator[tuple[Topic, str]]:
    """Yield what a message says."""
    for topic, pattern in _BY_WORD.get(word, ()):
        if found := pattern.search(message):
            yield topic, _text(found.groups())
            return
    if word.startswith(b"NET/") and (found := _GDR.match(message)):
        yield (_T.GDR_ON if found[1].lower() == b"en" else _T.GDR_OFF), _text(found.groups()[1:])
    elif word.startswith(b"NCCL_") and (found := _SET.match(message)):
        name = found[1].decode("ascii")
        value = Redaction().variables({name: found[2].decode("utf-8", "replace")})[name]
        yield _T.VARIABLE, printable(f"{name}={value}")
    elif word.startswith(b"GPU/"):
        paths = [path for path in _PATH.findall(message) if path in _NEARNESS]
        if paths:
            yield _T.NIC_PATH, f"{_text((word,))} {min(paths, key=_NEARNESS.index).decode()}"
    elif word.isdigit() and (found := _COLL_CHANNELS.match(message)):
        yield _T.CHANNELS, str(int(found[1]))
    elif found := _RETRY.search(message):
        yield _T.RETRY, _text(found.groups())
    elif is_warning:
        found = _FAILED_CALL.search(message)
        yield (_T.ERROR, _text(found.groups())) if found else (_T.WARNING, _text((message[:160],)))


@lru_cache(maxsize=4096)
def _text(groups: tuple[bytes | None, ...]) -> str:
    words = (part.decode("utf-8", "replace").strip() for part in groups if part)
    return printable(Redaction().text(" ".join(words)))[:400]
