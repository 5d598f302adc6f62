"""Where the ranks of a probe leave each other messages: torch's store, which survives when ranks stop answering.

A collective that lacks one rank fails on all of them. Results and decisions therefore travel as texts in the store that
rank 0's process holds: whoever does not answer in time is named, and the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

_BATCH = 512


class Board:
    """Messages by name, each written once and read by any rank. Values are what JSON takes.

    Args:
        store: of torch, a connection of our own.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def store(self) -> Any:
        """The store, for groups that are made by way of it."""
        return self._store

    def post(self, name: str, value: Any) -> None:
        """Leave a message.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._store.set(name, json.dumps(value, separators=(",", ":")))

    def read(self, name: str, timeout_s: float) -> Any:
        """Return a message, and wait for it if it is not there yet.

        Raises:
            TimeoutError: it did not come in time, or the store does not answer.
        """
        try:
            self._store.wait([name], timedelta(seconds=max(timeout_s, 0.001)))
            return json.loads(self._store.get(name))
        except RuntimeError as error:
            raise TimeoutError(f"no answer within {timeout_s:.3g} s") from error

    def gather(self, name: str, ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
        """Return the messages `NAME/RANK` of ranks; those that did not come in time are left out.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=max(timeout_s, 0.001)))
            present = list(keys)
        except RuntimeError:
            present = [rank for rank, key in keys.items() if self._store.check([key])]
        found: dict[int, Any] = {}
        for begin in range(0, len(present), _BATCH):
            some = present[begin : begin + _BATCH]
            texts = self._store.multi_get([keys[rank] for rank in some])
            found.update((rank, json.loads(text)) for rank, text in zip(some, texts, strict=True))
        return found
