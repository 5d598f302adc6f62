"""The errors of hpcpace as one small tree; each class has the exit code that a command ends with.

    HpcpaceError            4  the job or a tool failed
    +-- UsageError          2  an option, a setting or an input file is wrong
    |   +-- ConfigError     2  a configuration file or key
    |   +-- WorldError      2  ranks, launcher and environment contradict each other
    |   |   +-- ImpossibleWorld 2  the ranks of a job cannot find each other, or cannot work together
    |   +-- MeshError       2  mesh, model, batch and world do not fit together
    |   +-- DataError       2  training data
    |   +-- TraceError      2  a trace file or run directory cannot be read
    |   +-- SnapshotError   2  a snapshot of the audit cannot be read
    |   +-- ProbeError      2  a saved probe cannot be read, or is one of another cluster
    |   +-- TopologyError   2  a file that says where hosts are in the network cannot be used
    |   +-- NotEnoughMemory 2  what was asked for takes more memory than this process may use
    +-- CannotTell          3  the data cannot answer the question
    +-- ReportError         4  a bug in hpcpace made a report fail
    +-- TrainingFailed      4  not enough memory, or a checkpoint that is needed is missing
    +-- ClockSyncError      4  a clock synchronisation timed out (a session degrades, it never ends on this)

Every message says what was wrong, the value seen, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

EXIT_OK = 0
EXIT_WARNING = 1
EXIT_USAGE = 2
EXIT_CANNOT_TELL = 3
EXIT_FAILED = 4


class HpcpaceError(Exception):
    """Base class: something failed; the message is written for the user.

    A message that lists many reasons has each on a line of its own that begins with `- `, so that they can be folded.

    Attributes:
        is_verbose: whether the user wants all reasons; None of a command that does not ask.
    """

    exit_code = EXIT_FAILED
    is_verbose: bool | None = None


class UsageError(HpcpaceError):
    """An option, a setting or an input is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration file, key or value is wrong."""


class WorldError(UsageError):
    """Ranks, launcher and environment contradict each other."""


class ImpossibleWorld(WorldError):
    """The ranks of a job cannot find each other, or cannot work together.

    Attributes:
        is_told: whether another rank tells the user.
    """

    def __init__(self, message: str, *, is_told: bool) -> None:
        super().__init__(message)
        self.is_told = is_told


class MeshError(UsageError):
    """Mesh, model, batch and world do not fit together."""


class DataError(UsageError):
    """Training data cannot be used."""


class TraceError(UsageError):
    """A trace file or a run directory cannot be read."""


class SnapshotError(UsageError):
    """A snapshot of the audit cannot be read."""


class ProbeError(UsageError):
    """A saved probe cannot be read, or cannot be compared."""


class TopologyError(UsageError):
    """A file that says where hosts are in the network cannot be used."""


class NotEnoughMemory(UsageError):
    """What was asked for takes more memory than this process, or one that it started, may use."""


class CannotTell(HpcpaceError):
    """The data cannot answer the question."""

    exit_code = EXIT_CANNOT_TELL


class ReportError(HpcpaceError):
    """A bug in hpcpace made a report fail."""


class TrainingFailed(HpcpaceError):
    """Training cannot continue; the message gives the full reason, so no traceback is printed."""


class ClockSyncError(HpcpaceError):
    """A clock synchronisation did not finish in time."""


def with_reasons(message: str, reasons: Iterable[str]) -> str:
    """Return a message that lists reasons line by line."""
    return "\n- ".join([message, *reasons])


def check_package(name: str, *, extra: str) -> None:
    """Refuse to go on without a package that hpcpace does not always bring.

    Args:
        name: of the package, as it is imported.
        extra: of hpcpace, which brings it.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec(name) is None:
        raise UsageError(f"{name} is not installed: pip install 'hpcpace[{extra}]'")


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Make all checks, so that all mistakes of a user are reported together.

    Raises:
        UsageError: one or more checks did; of the kind of the first, with the messages of all.
    """
    mistakes = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            mistakes.append(error)
    if len(mistakes) > 1:
        raise type(mistakes[0])("; ".join(map(str, mistakes)))
    if mistakes:
        raise mistakes[0]
