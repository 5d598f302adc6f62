"""The probe that a report compares with: probe.json of the attempt, or a file that the user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcpace.errors import ProbeError
from hpcpace.probe.record import MOST_BYTES, ProbeRecord, probe_from, read_probe
from hpcpace.quoting import printable
from hpcpace.rundir import Attempt


@dataclass(frozen=True, kw_only=True)
class ReadProbe:
    """A saved probe, and the file that it came from."""

    source: str
    record: ProbeRecord


def read_probe_file(path: Path) -> ReadProbe:
    """Return the probe in a file.

    Raises:
        ProbeError: it cannot be read, or is no probe.
    """
    return ReadProbe(source=printable(str(path)), record=read_probe(path))


def read_probe_record(attempt: Attempt, problems: list[str]) -> ReadProbe | None:
    """Return the probe that was saved with an attempt; a sentence is added to `problems` where it cannot be used."""
    name = attempt.probe_json.name
    try:
        with attempt.open() as folder:
            content = folder.read(name, most_bytes=MOST_BYTES)
        return ReadProbe(source=name, record=probe_from(content, name))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ProbeError as error:
        reason = str(error)
    problems.append(f"{attempt.probe_json} is left out ({printable(reason)[:200]})")
    return None
