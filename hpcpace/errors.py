"""The errors of hpcpace, one small tree, each class with the exit code that a command ends with.

    HpcpaceError            4  the job or a tool failed
    +-- UsageError          2  an option, a setting or an input file is wrong
    |   +-- ConfigError     2  a configuration file or key
    |   +-- WorldError      2  ranks, launcher and environment do not fit together
    |   +-- MeshError       2  mesh, model, batch and world do not fit together
    |   +-- DataError       2  training data
    |   +-- TraceError      2  a trace file or run directory cannot be read
    |   +-- SnapshotError   2  a snapshot of the audit cannot be read
    +-- CannotTell          3  the data do not carry an answer
    +-- ReportError         4  hpcpace itself failed at a report
    +-- TrainingFailed      4  too little memory, or no checkpoint where one was needed
    +-- ClockSyncError      4  a clock synchronisation was given up (a session degrades, it never ends on this)

Every message says what was wrong, the value seen, and what to do.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_WARNING = 1
EXIT_USAGE = 2
EXIT_CANNOT_TELL = 3
EXIT_FAILED = 4


class HpcpaceError(Exception):
    """Base class: something failed; the message is written for the user."""

    exit_code = EXIT_FAILED


class UsageError(HpcpaceError):
    """An option, a setting or an input is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration file, key or value is wrong."""


class WorldError(UsageError):
    """Ranks, launcher and environment contradict each other."""


class MeshError(UsageError):
    """Mesh, model, batch and world do not fit together."""


class DataError(UsageError):
    """Training data cannot be used."""


class TraceError(UsageError):
    """A trace file or a run directory cannot be read."""


class SnapshotError(UsageError):
    """A snapshot of the audit cannot be read."""


class CannotTell(HpcpaceError):
    """The data do not carry an answer."""

    exit_code = EXIT_CANNOT_TELL


class ReportError(HpcpaceError):
    """A report was ended by an error of hpcpace's own."""


class TrainingFailed(HpcpaceError):
    """A training cannot go on, for a reason that its message says whole: no traceback is printed with it."""


class ClockSyncError(HpcpaceError):
    """A clock synchronisation did not finish in its time."""
