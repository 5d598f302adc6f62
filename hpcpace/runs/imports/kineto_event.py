"""An event of a profile of torch.profiler as msgspec decodes it: the fields that are used, and no others."""

from __future__ import annotations

from typing import Any

import msgspec


class KinetoArgs(msgspec.Struct, gc=False, frozen=True):
    """What is used of the arguments of an event, each of any type: files of many versions differ."""

    correlation: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    seq: Any = msgspec.field(default=None, name="Seq")
    dtype: Any = None
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    source: Any = msgspec.field(default=None, name="Src Rank")
    destination: Any = msgspec.field(default=None, name="Dst Rank")
    root: Any = msgspec.field(default=None, name="Root rank")


NO_ARGS = KinetoArgs()


class KinetoEvent(msgspec.Struct, gc=False):
    """One event; times in microseconds, negative where the file has none."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = -1.0
    dur: float = -1.0
    args: KinetoArgs = NO_ARGS
