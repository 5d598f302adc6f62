"""Chrome's trace format as a stream: batches of events, of a file of any size, and what is around them at the end.

The array of events is cut where one object ends and the next one begins, and each piece is decoded by msgspec into the
fields that are used here. A cut inside an object or a text leaves a bracket or quote open, so its piece is no JSON, and
an earlier cut is tried: a wrong cut cannot pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcpace.errors import TraceError, UsageError
from hpcpace.quoting import printable
from hpcpace.wording import plural

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_NUMBER = re.compile(rb"([:,\[]\s*)-?(?:nan|inf|infinity)\b", re.IGNORECASE)
"""What profilers write for a quotient by zero, and what is no JSON; read as null, which no time may be."""
_PIECE_BYTES = 4 << 20
_SEARCHED = 1 << 16
_MOST_CUTS = 64
_MOST_HEAD, _MOST_LEFT = 64 << 20, 256 << 20


def need_msgspec() -> None:
    """Refuse to go on without the package that decodes events.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise UsageError("profiles in JSON need msgspec: pip install 'hpcpace[import]'") from error


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class ChromeEvents:
    """The events of one file.

    Attributes:
        facts: members of the outermost object beside the events, complete after the last batch.
        problem: what is wrong with the file after all batches, such as that it is cut off; empty if nothing is.
        num_events: events so far.
    """

    def __init__(self, blocks: Iterator[bytes], path: Path, event: Any) -> None:
        """Begin to read.

        Args:
            blocks: content of the file.
            path: its path, for messages.
            event: the msgspec.Struct that an event becomes.
        """
        import msgspec

        self._blocks, self._path = blocks, path
        self._decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[event]).decode
        self._split = msgspec.json.Decoder(list[msgspec.Raw]).decode
        self._decode_one = msgspec.json.Decoder(event).decode
        self._num_odd, self._first_odd = 0, ""
        self._syntax, self._wrong = msgspec.DecodeError, msgspec.ValidationError
        self.facts: dict[str, Any] = {}
        self.problem = ""
        self.num_events = 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of events.

        Raises:
            TraceError: the file cannot be read, or is no JSON of this format.
        """
        left, enough = self._skip_head(), _PIECE_BYTES
        try:
            for block in self._blocks:
                left += block
                if len(left) > _MOST_LEFT:
                    left = b""
                    raise TraceError(f"{self._path} is no list of events after event {self.num_events}; is it damaged?")
                if len(left) < enough:
                    continue
                events, left = self._piece(left)
                # Where no cut was right, twice as much is awaited: a text of brackets is not searched for every block.
                enough = _PIECE_BYTES if events else 2 * len(left)
                if events:
                    yield events
        except TraceError as error:
            events, _ = self._piece(left)
            if events:
                yield events
            if not self.num_events:
                raise
            self.problem = f"{error}; its first {self.num_events} events are used"
        else:
            yield from self._rest(left)
        if self._num_odd and not self.num_events:
            raise TraceError(f"{self._path} is no profile: {self._first_odd}")
        if self._num_odd:
            odd = f"{self._path}: {plural(self._num_odd, 'event')} left out, such as one with {self._first_odd}"
            self.problem = f"{self.problem}; {odd}" if self.problem else odd

    def _skip_head(self) -> bytes:
        """Return what follows the bracket before the first event."""
        head = b""
        for block in self._blocks:
            head += block
            start = head.lstrip()[:1]
            if start == b"[":
                return head.lstrip()[1:]
            if start not in (b"{", b""):
                break
            for found in _EVENTS.finditer(head):
                try:
                    facts = json.loads(head[: found.start()] + b'"traceEvents": 0}')
                except (ValueError, RecursionError):
                    continue
                self.facts = {name: value for name, value in facts.items() if name != "traceEvents"}
                return head[found.end() :]
            if len(head) > _MOST_HEAD:
                break
        if not head:
            raise TraceError(f"{self._path} is empty")
        raise TraceError(
            f"{self._path} has no traceEvents: it is no profile in Chrome's format (it begins with"
            f" {printable(head[:20].decode('utf-8', 'replace'))})"
        )

    def _piece(self, left: bytes) -> tuple[list[Any], bytes]:
        """Return the events up to the last cut that can be made, and what follows it."""
        stop = len(left)
        while stop > 0:
            first = max(stop - _SEARCHED, 0)
            cuts = [found.start() for found in _BETWEEN.finditer(left, first, stop)]
            for cut in reversed(cuts[-_MOST_CUTS:]):
                events = self._decoded(left[: cut + 1])
                if events is not None:
                    return events, left[cut + 1 :].lstrip()[1:]
            stop = first + 64 if cuts == [] and first else 0
        if _NO_NUMBER.search(left):
            return self._piece(_NO_NUMBER.sub(rb"\1null", left))
        return [], left

    def _decoded(self, text: bytes) -> list[Any] | None:
        """Return the events of a text, or None if it is none of whole events."""
        try:
            events: list[Any] | None = self._decode(b"[" + text + b"]")
        except self._wrong:
            events = self._one_by_one(text)
        except (self._syntax, RecursionError):
            events = None
        if events is None:
            return None
        self.num_events += len(events)
        return events

    def _one_by_one(self, text: bytes) -> list[Any] | None:
        """Return the events of a text without those of another form, or None if it is none of whole events."""
        try:
            parts = self._split(b"[" + text + b"]")
        except (self._syntax, RecursionError):
            return None
        events = []
        for part in parts:
            try:
                events.append(self._decode_one(part))
            except self._wrong as error:
                self._num_odd += 1
                self._first_odd = self._first_odd or printable(str(error))[:120]
        return events

    def _rest(self, left: bytes) -> Iterator[list[Any]]:
        """Yield the last events, and read what follows them."""
        text = left.decode("utf-8", "replace")
        try:
            _, end = json.JSONDecoder(parse_constant=_refuse).raw_decode("[" + text)
        except (ValueError, RecursionError):
            is_number_missing = _NO_NUMBER.search(left)
            yield from self._rest(_NO_NUMBER.sub(rb"\1null", left)) if is_number_missing else self._cut_off(left)
            return
        events = self._decoded(text[: end - 2].encode("utf-8", "replace"))
        if events is None:
            yield from self._cut_off(left)
            self.problem = f"{self._path} is damaged after event {self.num_events}: what follows is left out"
        if events:
            yield events
        tail = text[end - 1 :].strip()
        try:
            more = json.loads("{" + tail.removeprefix(",")) if tail else {}
        except (ValueError, RecursionError):
            self.problem = f"{self._path}: what follows the events is damaged, and left out"
            return
        self.facts |= more

    def _cut_off(self, left: bytes) -> Iterator[list[Any]]:
        events, _ = self._piece(left)
        if events:
            yield events
        if not self.num_events:
            raise TraceError(f"{self._path} is cut off before its first event; copy it again")
        self.problem = f"{self._path} is cut off after event {self.num_events}: the rest of that rank is missing"
