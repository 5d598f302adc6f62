"""An event of a timeline of the what-if analysis as msgspec decodes it."""

from __future__ import annotations

from typing import Any

import msgspec


class WiaArgs(msgspec.Struct, gc=False, frozen=True):
    """Arguments of an operation, and the name of a track."""

    step: Any = None
    microbatch: Any = msgspec.field(default=None, name="mb_id")
    seq: Any = msgspec.field(default=None, name="seq_id")
    chunk: Any = msgspec.field(default=None, name="model_chunk")
    name: Any = None


class WiaEvent(msgspec.Struct, gc=False):
    """One event; times in microseconds, `pid` is the data-parallel rank."""

    ph: str = ""
    name: str = ""
    pid: int = -1
    tid: int = -1
    ts: float = 0.0
    dur: float = 0.0
    args: WiaArgs = WiaArgs()
